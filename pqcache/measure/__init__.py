"""Bandwidths of this machine, sizes of known models, and the least time of a decode step that follows from both."""
