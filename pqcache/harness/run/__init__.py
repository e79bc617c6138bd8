"""Running cells: models, the lm-eval adapter, samples, timing."""
