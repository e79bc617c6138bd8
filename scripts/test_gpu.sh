#!/usr/bin/env bash
# The tests that need a GPU, the most telling first, in under nine minutes. Output is kept, also of a run that was cut off.
#
#   scripts/test_gpu.sh                 # output in results/tiny/test_gpu
#   scripts/test_gpu.sh "$OUT"          # output in $OUT: one file per group of tests, and summary.txt
#   MINUTES=4 scripts/test_gpu.sh       # no group is begun after four minutes, and none goes on
#
# Needs torch, triton, transformers, pytest, pytest-timeout, hypothesis and this checkout. Exit code 1 if a group failed or ran
# out of time. Compiled kernels are kept in .triton/, see scripts/bench_gpu.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
OUT=${1:-results/tiny/test_gpu}
END=$(($(date +%s) + $(awk "BEGIN { print int(60 * ${MINUTES:-8}) }")))
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/.triton}"
$PYTHON pqcache/device/kernel_cache.py "$TRITON_CACHE_DIR" # it may have been carried here
mkdir -p "$OUT"
: >"$OUT/summary.txt"
failed=0

# name, seconds it may take, and what pytest is given
group() {
    local name=$1 seconds=$2 left
    shift 2
    left=$((END - $(date +%s)))
    if ((left < 5)); then
        echo "$name: not begun, the time is over" | tee -a "$OUT/summary.txt"
        failed=1
        return
    fi
    timeout -k 5 $((seconds < left ? seconds : left)) \
        $PYTHON -m pytest -p no:cacheprovider -q --maxfail=5 --durations=5 "$@" >"$OUT/$name.txt" 2>&1
    local code=$?
    local last
    last=$(tail -n 1 "$OUT/$name.txt")
    ((code == 124 || code == 137)) && last="ended after $((seconds < left ? seconds : left)) s; $last"
    echo "$name: exit code $code: $last" | tee -a "$OUT/summary.txt"
    ((code == 0)) || failed=1
}

group kernels 150 -m 'not slow' tests/device/test_triton_{codes,attend,packed,blocks,nearest,sums}.py
group steps 60 -m 'not slow' tests/device/test_triton_step.py
group recorded 90 -m gpu tests/invariants/test_gpu.py -k 'waits or recorded or host_store_equals or stale'
group invariants 240 -m gpu tests/invariants/test_gpu.py -k 'not waits and not recorded and not host_store_equals and not stale'
group other 120 -m gpu tests --ignore=tests/invariants/test_gpu.py
exit $failed
