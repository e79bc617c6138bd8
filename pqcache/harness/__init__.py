"""Runs methods on tasks: configuration, models, the lm-eval adapter, resumable cells, rows, tables and figures."""
