#!/usr/bin/env bash
# The tests that need a GPU, the most telling first. Output is kept, also of a run that was cut off.
#
#   scripts/test_gpu.sh                 # output in results/tiny/test_gpu
#   scripts/test_gpu.sh "$OUT"          # output in $OUT: one file per group of tests, and summary.txt
#
# Needs torch, triton, transformers, pytest, pytest-timeout, hypothesis and this checkout. Exit code 1 if a group failed or took
# longer than its seconds.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${1:-results/tiny/test_gpu}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT"
: >"$OUT/summary.txt"
failed=0

# name, seconds it may take, and what pytest is given
group() {
    local name=$1 seconds=$2
    shift 2
    timeout -k 5 "$seconds" "${PYTHON:-python3}" -m pytest -p no:cacheprovider -q --maxfail=5 "$@" >"$OUT/$name.txt" 2>&1
    local code=$?
    ((code == 0)) || failed=1
    echo "$name: exit code $code: $(tail -n 1 "$OUT/$name.txt")" | tee -a "$OUT/summary.txt"
}

group kernels 150 -m 'not slow' tests/device/test_attend.py
group recorded 90 -m gpu tests/invariants/test_gpu.py -k 'waits or recorded'
group invariants 240 -m gpu tests/invariants/test_gpu.py -k 'not waits and not recorded'
group other 120 -m gpu tests --ignore=tests/invariants/test_gpu.py
exit $failed
