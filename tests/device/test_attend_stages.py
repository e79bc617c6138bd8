"""How many tiles of K and V the attention kernel has under way, read off its shared memory; nothing runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, torch
from pqcache.device import triton_attend, triton_compile

def calls(quick):
    kv = torch.zeros((1, 8, 8192, 128), dtype=torch.float16), torch.zeros((1, 8, 8192, 128), dtype=torch.float16)
    q, chosen = torch.zeros((1, 32, 1, 128), dtype=torch.float16), torch.zeros((1, 8, 512), dtype=torch.int32)
    cursor, plan = torch.zeros(1, dtype=torch.int32), torch.zeros((1, 4), dtype=torch.int32)
    sizes = {"ring": 8192, "tokens": 1024, "scaling": 1.0}
    triton_attend.attend(q, kv, kv, kv, chosen, cursor, plan, one=True, **sizes)  # resident
    triton_attend.attend(q, kv, None, kv, None, cursor, plan, one=True, **sizes)  # everything
    triton_attend.attend(q, kv, kv, kv, chosen, cursor, plan, n_sink=32, **sizes)  # from a host store
    triton_attend.attend(q, kv, kv, kv, None, cursor, plan, n_sink=32, **sizes)  # from a block cache
    for dtype in (torch.float16, torch.float32):
        q, x = torch.zeros((1, 8, 1, 256), dtype=dtype), torch.zeros((1, 8, 8192, 256), dtype=dtype)
        triton_attend.attend(q, (x, x), None, (x, x), None, cursor, plan, one=True, **sizes)

print(json.dumps([row for row in triton_compile.compile_all(calls=calls) if row["kernel"] == "_attend"]))
"""


@pytest.mark.rest
@pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
def test_a_tile_is_read_while_another_is_multiplied():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    shared = [row["shared"] for row in json.loads(done.stdout)]
    tile = 64 * 128 * 2
    assert len(shared) == 6
    assert max(shared[4:]) <= 227 * 1024, shared  # of one program: 282,688 bytes were asked for once
    shared = shared[:4]
    assert min(shared) >= 2 * 2 * tile, shared  # two of K and two of V
    assert 2 * max(shared) <= 227 * 1024, shared  # two programs on a Hopper multiprocessor, as many as are launched
