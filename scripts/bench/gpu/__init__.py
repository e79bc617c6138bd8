"""What `scripts/bench_gpu.py` is made of: clock and ceilings, kernel checks, decode rows, targets and pictures."""
