"""kernels=torch, the default: nothing of pqcache.device is imported or used, on any device."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from pqcache.selective import SelectiveCache
from pqcache.selective.support import accelerator

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
sys.modules["pqcache.device"] = sys.modules["triton"] = None  # an import raises ImportError
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import pqcache
from pqcache.registry import method_class
from pqcache.selective import generate
from pqcache.selective.support import accelerator

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=16)
model = AutoModelForCausalLM.from_config(config).eval()
for device in ("cuda", "cuda:1", "cpu", "mps"):
    assert accelerator("torch", torch.device(device), torch.float16) is None
ids = torch.arange(60)[None]
for name in ("full", "pqcache", "snapkv", "kivi"):
    options = {"group": 8} if name == "kivi" else {}
    generate(model, method_class(name)(**options), ids, max_new_tokens=4)
    with pqcache.use(model, name, **options):
        model.generate(ids, max_new_tokens=4, do_sample=False)
try:
    accelerator("auto", torch.device("cuda"), torch.float16)
except ImportError:
    print("only kernels=auto imports it")
"""


@pytest.mark.rest
def test_nothing_of_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("only kernels=auto imports it\n"), done.stderr[-2000:]


def test_auto_without_a_gpu_is_torch_and_says_so(llama: PreTrainedModel) -> None:
    with pytest.warns(RuntimeWarning, match="kernels=auto: no kernel serves a model on cpu"):
        assert SelectiveCache(llama, Full(), kernels="auto").accelerator is None


@pytest.mark.usefixtures("pretended")
def test_it_is_chosen_by_device_and_type(llama: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerator("auto", torch.device("cpu"), torch.float32) is not None
    with pytest.warns(RuntimeWarning, match="in float64"):
        assert accelerator("auto", torch.device("cpu"), torch.float64) is None


def test_an_unknown_value_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="kernels=triton: allowed is torch or auto"):
        SelectiveCache(llama, Full(), kernels="triton")
