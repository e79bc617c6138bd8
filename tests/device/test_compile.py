"""Every Triton kernel compiles for a GPU that is not there: what the interpreter lets pass, the compiler may refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SCRIPT = """
import json
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pqcache.device import attend, launch, scores
from pqcache.store.layout import Codes
from pqcache.store.quantizer import packed_width


no_device = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=0: 0,
)
rows, run = [], JITFunction.run


def compile_only(kernel, *args, **options):
    binary = run(kernel, *args, **{**options, "warmup": True})
    rows.append((kernel.__name__, binary.metadata.shared))


triton.runtime.driver.set_active(no_device)
JITFunction.run = compile_only
n, h_kv, g, tokens = 1, 8, 4, 1024
counts = torch.zeros(n, h_kv, attend.COLUMNS, dtype=torch.int32)
half = lambda *sizes: torch.zeros(n, h_kv, *sizes, dtype=torch.float16)


def codes(bits, d, **parts):
    return Codes(bits, d, torch.zeros(n, h_kv, tokens, packed_width(d, bits), dtype=torch.uint8), **parts)


for dtype in (torch.float16, torch.bfloat16, torch.float32):
    for d in (64, 96, 128, 256):
        x, q = torch.zeros(n, h_kv, tokens, d, dtype=dtype), torch.zeros(n, h_kv * g, 1, d, dtype=dtype)
        for picks in (None, torch.zeros(n, h_kv, 512, dtype=torch.int32)):
            attend.attend(q, [attend.TokenList((x, x), counts, tokens, picks=picks)], 1.0)
        for bits in (2, 3, 8) if d == 128 else ():
            by_token = codes(bits, d, token_step=half(tokens, d // 32), token_low=half(tokens, d // 32))
            by_channel = codes(bits, d, channel_step=half(tokens // 32, d), channel_low=half(tokens // 32, d), span=32)
            attend.attend(q, [attend.TokenList((x, x), counts, tokens, by_channel, by_token)], 1.0)
        for m, c, kind in ((2, 64, torch.uint8), (1, 4096, torch.int16)):
            centroids = torch.zeros(n, h_kv, m, c, d // m, dtype=torch.float16)
            line = torch.zeros(n, h_kv * m, tokens, dtype=kind)
            scores.scores(q, centroids, line, torch.zeros(n, dtype=torch.long), 1.0)
print(json.dumps(rows))
"""


@pytest.mark.rest
def test_kernels_compile_for_sm_90_and_fit_a_multiprocessor() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {name for name, _ in rows} == {"_attend", "_join", "_scores"}
    assert max(shared for _, shared in rows) <= 227 * 1024  # of a Hopper multiprocessor, per program
