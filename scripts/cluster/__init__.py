"""Runs that are disturbed on purpose, and compared with undisturbed ones."""
