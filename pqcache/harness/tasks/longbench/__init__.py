"""LongBench v1: its data sets alone, as a group, and LongBench-E."""
