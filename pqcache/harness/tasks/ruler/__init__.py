"""RULER: the task, and its constructed rows."""
