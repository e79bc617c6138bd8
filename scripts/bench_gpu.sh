#!/usr/bin/env bash
# Check and benchmark everything on one GPU, in under nine minutes: results go to results/reference/<device>/.
#
#   scripts/bench_gpu.sh                        # Mistral-7B's geometry, random fp16 weights, 32K to 128K tokens, budget 0.1
#   scripts/bench_gpu.sh --lengths 32768        # options go to scripts/bench_gpu.py (--help lists them)
#   scripts/bench_gpu.sh --tiny --device cpu    # that it runs, in about a minute, on any machine; measures nothing
#
# Needs torch, triton, transformers and this checkout. Where pytest and hypothesis are there, the GPU tests run first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

if [[ " $* " != *" --tiny "* ]] && $PYTHON -c 'import pytest, pytest_timeout, hypothesis' 2>/dev/null; then
    timeout 120 $PYTHON -m pytest -q -m 'not slow' -p no:cacheprovider \
        tests/device/test_triton_{codes,attend,blocks,nearest,step}.py || echo "kernel tests: FAILED or out of time"
    timeout 60 $PYTHON -m pytest -q -m gpu -p no:cacheprovider tests/invariants/test_gpu.py \
        -k 'waits or recorded or host_store_equals or stale' || echo "GPU tests: FAILED or out of time"
fi
$PYTHON scripts/bench_gpu.py "$@"
