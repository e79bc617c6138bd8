"""Training, measuring and documenting the embedded model; nothing here is needed to use it."""
