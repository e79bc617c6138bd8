#!/usr/bin/env bash
# Benchmark everything on one GPU, in under nine minutes. The tests have a call of their own: scripts/test_gpu.sh.
#
#   scripts/bench_gpu.sh                        # Mistral-7B's geometry, random fp16 weights, 128K and 32K tokens, budget 0.1
#   scripts/bench_gpu.sh --out "$OUT"           # rows as they are measured in $OUT/rows.jsonl
#   scripts/bench_gpu.sh --lengths 32768        # options go to scripts/bench_gpu.py (--help lists them)
#   scripts/bench_gpu.sh --tiny --device cpu    # that it runs, in a few minutes, on any machine; measures nothing
#
# Needs torch, triton, transformers and this checkout. Compiled kernels are kept in .triton/, which may be carried to a machine of
# the same kind: python -m pqcache.device.triton_compile fills it for sm_90 without a GPU (TRITON_CACHE_DIR=.triton).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/.triton}"
$PYTHON pqcache/device/kernel_cache.py "$TRITON_CACHE_DIR" # it may have been carried here
exec $PYTHON scripts/bench_gpu.py "$@"
