"""Runs a program that a model wrote: `parent` starts a process, `child` is that process."""
