"""The module that lm-eval gets in place of a file that cannot be imported here: each function calls the process's.

lm-eval's loader takes a definition's functions from `sys.modules` where the file's module is known and the file has not
changed (lm_eval/tasks/_yaml_loader.py, `_load_module_with_cache`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pqcache.harness.tasks.math_process import packages
from pqcache.harness.tasks.math_process.parent import CallFailed, Functions, ImportFailed

Metrics = Callable[[dict, list[str]], dict[str, Any]]
SECONDS = 30.0  # for one answer; lm-eval's own limits end at about 20, where Python can be interrupted
LOADING = 600.0  # seconds for a function that is no scoring, such as reading a split


class CannotScore(ValueError):
    """The packages are not there, or do not work; the message is one line that says what to do."""


@cache
def functions_of(file: Path, folder: Path) -> Functions:
    """One process per file, for the whole run."""
    return Functions(file, folder)


def failing_file(error: BaseException) -> Path | None:
    """lm-eval's own file of a task whose import raised `error`; None: it was raised elsewhere."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).resolve().parent
    trace = error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if trace.tb_frame.f_code.co_name == "<module>" and file.is_relative_to(root) and file.parent != root:
            return file
        trace = trace.tb_next
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
        raise CannotScore(_broken(folder, failed)) from failed
    path = file.relative_to(Path(lm_eval.tasks.__file__).resolve().parent).with_suffix("")
    module = _StandIn(".".join(("lm_eval", "tasks", *path.parts)), functions)
    module.__file__ = str(file)
    module.__mtime__ = file.stat().st_mtime_ns  # type: ignore[attr-defined]  # lm-eval asks for it
    sys.modules[module.__name__] = module
    return functions


def _broken(folder: Path, failed: CallFailed) -> str:
    return f"the packages in {folder} cannot be used ({failed}); `{packages.command()}` installs them"


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
        return _back(functions.call(name, *map(_plain, arguments), seconds=seconds))

    remote.__name__ = name
    remote.functions = functions  # type: ignore[attr-defined]
    return remote


def process_of(function: Any) -> Functions | None:
    """The process that runs a task's function; None: it runs here."""
    found = getattr(function, "functions", None)
    return found if isinstance(found, Functions) else None


def forgiving(scoring: Metrics, metrics: Iterable[str], unscored: list[str]) -> Metrics:
    """A task's process_results, for which an answer is wrong that could not be scored. unscored gets the reason.

    It raises CannotScore where no answer could be.
    """
    wrong = dict.fromkeys(metrics, 0)

    def scored(doc: dict, results: list[str]) -> dict[str, Any]:
        try:
            return scoring(doc, results)
        except ImportFailed as failed:
            raise CannotScore(_broken(packages.folder(), failed)) from failed
        except CallFailed as failed:
            unscored.append(str(failed))
            return dict(wrong)

    return scored


def _plain(argument: Any) -> Any:
    from datasets import Dataset

    return {"rows": argument.to_list()} if isinstance(argument, Dataset) else argument


def _back(value: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_list(value["rows"]) if isinstance(value, dict) and set(value) == {"rows"} else value
