"""Commands: benchmarks (`bench_*.py`), profiles, tables at equal bytes, training of the embedded model (`embedded/`)."""
