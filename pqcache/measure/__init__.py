"""Bandwidths of this machine, sizes of known models, and the bound of a decode step that follows from both."""
