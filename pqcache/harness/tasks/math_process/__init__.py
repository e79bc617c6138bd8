"""lm-eval's mathematics tasks beside Hydra: their functions run in a process with packages of its own.

Those tasks read formulas with ANTLR 4.11, Hydra needs ANTLR 4.9, and an environment holds one of them. So a folder that is not
part of the environment (`packages`) holds ANTLR 4.11, sympy and math_verify, and only the process whose path begins with it
sees them. lm-eval gets a module in place of the file that cannot be imported: each of its functions calls the process's. Its
loader takes a definition's functions from `sys.modules` where the file's module is known and the file has not changed
(lm_eval/tasks/_yaml_loader.py, `_load_module_with_cache`).
"""

import atexit
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pqcache.harness.tasks.math_process import packages
from pqcache.harness.tasks.process import CHILD, CallFailed, ImportFailed, Process

Metrics = Callable[[dict, list[str]], dict[str, Any]]
SECONDS = 30.0  # for one answer; lm-eval's own limits end at about 20, where Python can be interrupted
LOADING = 600.0  # seconds for a function that is no scoring, such as reading a split
START = 120.0  # seconds until sympy is loaded, at most
MEMORY = 4096  # MiB of address space
LINE = 1 << 30  # bytes of a line, which may be a whole data set
# its libraries reserve address space for each thread
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
DISTRIBUTIONS = ("antlr4-python3-runtime", "sympy", "math-verify")


class CannotScore(ValueError):
    """The packages are not there, or do not work; the message is one line that says what to do."""


def _broken(failed: CallFailed) -> CannotScore:
    what = f"the packages in {packages.folder()} cannot be used ({failed})"
    return CannotScore(f"{what}; `{packages.command()}` installs them")


class Functions:
    """The functions of one file, run by a process of their own, which is started at the first call and used for all of them."""

    def __init__(self, file: Path, folder: Path, distributions: Iterable[str] = DISTRIBUTIONS) -> None:
        """folder: searched for packages before this environment. distributions: packages whose versions are told."""
        self.file, self.folder, self.distributions = file, folder, tuple(distributions)
        self.versions: dict[str, str] = {}  # of the distributions, once the process was started
        self.process: Process | None = None

    def start(self) -> Process:
        """Start the process unless it runs. Raises CallFailed if it cannot load the file."""
        if self.process is not None and self.process.alive:
            return self.process
        self.stop()
        path = [str(self.folder), *(path for path in sys.path if path)]
        bounds = {"parent": os.getpid(), "memory": MEMORY, "longest": LINE}
        settings = {"how": None, **bounds, "data_sets": True, "path": path}
        command = [sys.executable, "-s", "-S", "-B", str(CHILD), json.dumps(settings)]
        self.process = process = Process(command, LINE, data_sets=True, env={**os.environ, **ONE_THREAD})
        atexit.register(self.stop)
        process.send({"file": str(self.file)})
        try:
            process.ready(START)
            self.versions = process.call(None, *self.distributions, seconds=START)
        except (OSError, CallFailed) as error:
            self.stop()
            raise CallFailed(str(error)) from error
        return process

    def stop(self) -> None:
        """End the process. The next call starts another one."""
        if self.process is not None:
            self.process.end()
        self.process = None
        atexit.unregister(self.stop)

    def call(self, name: str, *arguments: Any, seconds: float) -> Any:
        """What a function returns. Raises CallFailed, see `Process.call`."""
        return self.start().call(name, *arguments, seconds=seconds)


functions_of = cache(Functions)  # one process per file, for the whole run


def failing_file(error: BaseException) -> Path | None:
    """lm-eval's own file of a task whose import raised `error`; None: it was raised elsewhere."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).resolve().parent
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "<module>" and file.is_relative_to(root) and file.parent != root:
            return file
    return None


def install(file: Path) -> Functions:
    """Give lm-eval functions in place of a file's own. Raises CannotScore."""
    import lm_eval.tasks

    folder = packages.folder()
    if not folder.is_dir():
        raise CannotScore(f"it needs ANTLR 4.11, and Hydra needs 4.9; `{packages.command()}` installs it into {folder}")
    functions = functions_of(file, folder)
    try:
        functions.start()
    except CallFailed as failed:
        raise _broken(failed) from failed
    path = file.relative_to(Path(lm_eval.tasks.__file__).resolve().parent).with_suffix("")
    module = _StandIn(".".join(("lm_eval", "tasks", *path.parts)), functions)
    module.__file__ = str(file)
    module.__mtime__ = file.stat().st_mtime_ns  # type: ignore[attr-defined]  # lm-eval asks for it
    sys.modules[module.__name__] = module
    return functions


class _StandIn(ModuleType):
    """A module whose attributes are functions of the process."""

    def __init__(self, name: str, functions: Functions) -> None:
        super().__init__(name)
        self._functions = functions

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):  # what import machinery asks every module for
            raise AttributeError(name)
        return _remote(self._functions, name)


def _remote(functions: Functions, name: str) -> Callable[..., Any]:
    def remote(*arguments: Any) -> Any:
        seconds = SECONDS if name == "process_results" else LOADING
        return functions.call(name, *arguments, seconds=seconds)

    remote.__name__ = name
    remote.functions = functions  # type: ignore[attr-defined]
    return remote


def forgiving(scoring: Metrics, metrics: Iterable[str], unscored: list[str]) -> Metrics:
    """A task's process_results, for which an answer is wrong that could not be scored. unscored gets the reason.

    It raises CannotScore where no answer could be.
    """
    wrong = dict.fromkeys(metrics, 0)

    def scored(doc: dict, results: list[str]) -> dict[str, Any]:
        try:
            return scoring(doc, results)
        except ImportFailed as failed:
            raise _broken(failed) from failed
        except CallFailed as failed:
            unscored.append(str(failed))
            return dict(wrong)

    return scored
