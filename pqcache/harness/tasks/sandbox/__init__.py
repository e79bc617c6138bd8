"""Runs functions that a model wrote, and judges them without executing them.

    reason = judged(program, entry_point, tests, helpers, timeout=3.0)      # None: the tests pass

Two processes, isolated alike: `candidate` executes the program and answers calls; `judge` runs the tests and calls the
candidate through a pipe that carries plain data (`wire`). `isolate` says what neither of them can reach, `parent` starts
both. The verdict comes from the judge, which never executes the program.
"""
