#!/usr/bin/env bash
# Benchmark kernels and decode steps on one GPU; options go to scripts/bench_gpu.py (--help lists them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" scripts/bench_gpu.py "$@"
