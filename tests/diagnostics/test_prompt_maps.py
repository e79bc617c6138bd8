"""Maps of a prompt: accumulated and normalised attention, sizes of keys and values; and the figures' numbers."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedModel

from baselines.full import Full
from pqcache.api.drive import tokens
from pqcache.diagnostics import PROMPT_ARRAYS, Capture, PromptMaps
from pqcache.harness.report.special_figures import salient_share, shrunk
from pqcache.selective import generate
from tests.baselines.drive import eager_probs


@pytest.mark.parametrize("chunk", [None, 17])
def test_maps_are_those_of_the_prompts_own_attention(llama: PreTrainedModel, chunk: int | None) -> None:
    s, maps, capture = 50, PromptMaps(), Capture()
    ids = torch.tensor([tokens(s, 1)])
    generate(llama, Full(), ids, max_new_tokens=3, prefill_chunk=chunk, watchers=[maps, capture])
    arrays = maps.arrays()
    assert arrays.keys() == PROMPT_ARRAYS.keys()
    for at, probs in enumerate(eager_probs(llama, tokens(s, 1))):
        calls = [c for c in capture.calls if c.ctx.layer_idx == at and not c.ctx.step.decode]
        k, v = (torch.cat([getattr(c, name)[0] for c in calls], 1).float() for name in "kv")
        sums = probs.float().sum(1).unflatten(0, (2, 2)).sum(1)
        torch.testing.assert_close(arrays["accumulated"][at], sums, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(arrays["normalised"][at], sums / torch.arange(s, 0, -1), rtol=1e-4, atol=1e-5)
        if at == 1:  # of three
            assert int(arrays["layer"]) == at
            for name, x in (("keys", k), ("values", v)):
                wanted = x.abs().transpose(0, 1).flatten(1)
                torch.testing.assert_close(arrays[name].float(), wanted, rtol=1e-3, atol=1e-3)
    assert PromptMaps().arrays() == {}


def test_share_of_heads_in_which_a_token_is_salient() -> None:
    scores = torch.tensor([[[3.0, 2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 9.0, 8.0, 7.0]]])
    assert salient_share(scores, 0.4).tolist() == [0.5, 0.5, 0.5, 0.5, 0.0]
    assert salient_share(scores, 1.0).tolist() == [1.0] * 5


def test_large_maps_keep_their_outliers() -> None:
    x = torch.zeros(3000, 10)
    x[1234, 5] = 7.0
    small = shrunk(x)
    assert small.shape == (1000, 10) and small.max() == 7.0 and small[411, 5] == 7.0
    assert shrunk(x[:100]).shape == (100, 10)


PEAKS = """
import json, torch
from pqcache.measure.peak import peak_memory
peaks = []
for size in (0, 32 << 20, 0):  # 128 MiB, freed at once
    with peak_memory(torch.device("cpu")) as peak:
        torch.ones(size)
    peaks.append(peak.get("peak_memory_bytes"))
print(json.dumps([peak.get("peak_memory_of"), *peaks]))
"""


@pytest.mark.rest
def test_the_peak_is_of_what_runs_inside() -> None:
    """In a process of its own: memory that other tests have freed could serve what is measured."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    of, *peaks = json.loads(done.stdout)
    if None in peaks:
        pytest.skip("this system does not say how much memory a process held at most")
    without, held, after = peaks
    assert of == "process"
    assert held - without > 100 << 20
    assert held - after > 100 << 20
