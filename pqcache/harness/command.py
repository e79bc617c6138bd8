"""The command: run.py in a clone, `pqcache` where the package is installed. run.py says what can be typed.

Nothing heavy is imported before the command is known to be right: a wrong one is answered at once.
"""

import errno
import importlib.util
import os
import sys

from pqcache.places import CONFIGS

HELP = {"--help", "-h"}
HYDRA_ANSWERS = {"--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc"}
# What the harness imports -> what pip calls it. numba is left out: without it plain torch runs.
_MODULES = (
    "datasets filelock lm_eval jinja2 matplotlib omegaconf pandas plotly psutil rapidfuzz rouge rouge_score tqdm wandb"
)
NEEDS = {"hydra": "hydra-core", **{module: module.replace("_", "-") for module in _MODULES.split()}}


def console() -> int:
    """The console command."""
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run a command line. Exit codes: 0 done, 1 a cell failed, 2 the command is wrong, 130 interrupted."""
    try:
        return _checked(argv)
    except KeyboardInterrupt:  # before a run begins, which says itself what is done
        print("\ninterrupted", file=sys.stderr)
        return 130


def _checked(argv: list[str]) -> int:
    """`main` where nobody interrupts."""
    if wrong := [word for word in argv if word != word.encode(errors="replace").decode()]:
        print(f"error: {ascii(wrong[0])[1:-1][:200]}: is no UTF-8", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except OSError:
        print("error: the working folder no longer exists; change to another one", file=sys.stderr)
        return 2
    if missing := [p for m, p in NEEDS.items() if not (sys.modules.get(m) or importlib.util.find_spec(m))]:
        print(f"error: {', '.join(missing)}: not installed; pip install 'pqcache-lab[harness]'", file=sys.stderr)
        return 2
    from pqcache.harness.config.options import Refused
    from pqcache.harness.run.streams import guarded

    with guarded() as out:
        try:
            code = _run(argv)
        except Refused as refused:
            for line in refused.lines:
                print(f"error: {line}", file=sys.stderr)
            code = 2
        out.flush()
        if out.error is not None and out.error.errno != errno.EPIPE:
            print(f"error: standard output cannot be written ({out.error.strerror})", file=sys.stderr)
            code = code or 1
    return code


def answered_by(argv: list[str]) -> str:
    """What answers a command line that runs nothing: rows (report=, tables=, advise=) or lookup (list=, explain=); else empty."""
    if any(word.startswith(("report=", "tables=", "advise=")) for word in argv):
        return "rows"
    return "lookup" if any(word.partition("=")[0] in ("list", "explain") for word in argv) else ""


def _run(argv: list[str]) -> int:
    """Answer, plan or run what was typed. Raises Refused."""
    words = {argument.partition("=")[0] for argument in argv}
    if not argv or HELP & words:
        from pqcache.harness import lookup

        print(lookup.full_help() if argv else lookup.short_help())
        return 0
    if HYDRA_ANSWERS & words:
        import hydra

        try:
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")(lambda _: None)()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0
    if (by := answered_by(argv)) == "rows":
        from pqcache.harness.report import folder_command

        return folder_command.answer(argv)
    if by == "lookup":
        from pqcache.harness import lookup

        return lookup.answer(argv)
    from pqcache.harness.config.cells import make_plan
    from pqcache.harness.config.compose import compose_all

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

    return run_plan(plan, Total())


if __name__ == "__main__":
    sys.exit(console())
