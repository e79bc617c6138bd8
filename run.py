"""Run causal LMs under KV-cache methods and measure quality, latency and bytes.

    python run.py method=pqcache budget=0.2                                 one cell: prints its row and its row.json
    python run.py -m method=full,oracle,pqcache,streaming budget=0.1,0.2     a sweep: ends with one table
    python run.py experiment=demo                                           a table kept as configs/experiment/demo.yaml
    python run.py method=pqcache task.length=4096 method.m=4 --cfg job      print the configuration, run nothing
    python run.py experiment=demo plan=true                                 what it would do, need and take; run nothing
    python run.py report=results/runs                                       one HTML file of rows that are there
    python run.py tables=results/runs rows=method columns=budget            tables of them
    python run.py --help                                                    groups and top-level keys

Exit codes: 0 done, 1 a cell failed, 2 the command is wrong (nothing was loaded), 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent / "configs"
HYDRA_ANSWERS = {"--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc"}


def main(argv: list[str]) -> int:
    try:
        os.getcwd()
    except OSError:
        print("error: the working folder no longer exists; change to another one", file=sys.stderr)
        return 2
    if HYDRA_ANSWERS & {argument.partition("=")[0] for argument in argv}:
        import hydra

        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(lambda _: None)()
        return 0

    from pqcache.harness.config.cells import make_plan
    from pqcache.harness.config.compose import compose_all
    from pqcache.harness.config.options import Refused
    from pqcache.harness.report import folder_command

    try:
        if folder_command.asked(argv):
            return _guarded(lambda: folder_command.answer(argv))
        request = compose_all(argv, CONFIGS)
        plan = make_plan(request)
        if request.show_config:
            print("---\n".join(cell.yaml() for cell in plan.cells), end="")
            return 0
        if plan.cells[0].run.plan:
            from pqcache.harness.launch.plan import show

            return show(plan)
        # lm-eval and all the rest: only once the command is known to be right
        from pqcache.harness.launch.progress import Total
        from pqcache.harness.run.runner import run_plan

        return _guarded(lambda: run_plan(plan, Total()))
    except Refused as refused:
        for line in refused.lines:
            print(f"error: {line}", file=sys.stderr)
        return 2


def _guarded(work: Callable[[], int]) -> int:
    """The exit code of what prints, also where standard output is closed or full."""
    from pqcache.harness.run.streams import guarded

    with guarded() as out:
        code = work()
        out.flush()
        if out.error is not None and out.error.errno != errno.EPIPE:
            print(f"error: standard output cannot be written ({out.error.strerror})", file=sys.stderr)
            code = code or 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
