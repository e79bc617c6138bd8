"""The process that runs the functions of one file: python child.py <settings>. Standard library only, beside that file's needs.

settings: JSON of {"file", "path", "parent", "memory", "distributions"}. file: whose functions are called. path: its `sys.path`.
parent: the id of the process that calls. memory: MiB of address space. distributions: packages whose versions are told.

The first line of stdout is {"ready": {package: version}} or {"error": text}. Then each line of stdin, {"call": name,
"arguments": [...]}, has one line of stdout as its answer: {"value": ...} or {"error": text, "import": true where a package is
missing}. A data set crosses as {"rows": [...]}. Whatever else the functions write is dropped. The process ends with its
parent, also in the middle of a call.
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Elsewhere than on Linux it ends at its next read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that call
            os._exit(1)


def limit_memory(mebibytes: int) -> None:
    """Numbers such as 9^(9^9) must fail here, not fill the machine."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mebibytes << 20
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def load(file: str) -> Any:
    """The module of a file."""
    spec = importlib.util.spec_from_file_location("functions", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["functions"] = module
    spec.loader.exec_module(module)
    return module


def given(argument: Any) -> Any:
    """An argument as the function expects it."""
    if isinstance(argument, dict) and set(argument) == {"rows"}:
        from datasets import Dataset

        return Dataset.from_list(argument["rows"])
    return argument


def plain(value: Any) -> Any:
    """A function's value as JSON can hold it."""
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(value, datasets.Dataset):
        return {"rows": value.to_list()}
    return value


def text_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    settings = json.loads(sys.argv[1])
    end_with(settings["parent"])
    limit_memory(settings["memory"])
    answers = os.fdopen(os.dup(1), "wb")
    calls = os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    sys.path[:] = settings["path"]
    try:
        module = load(settings["file"])
        tell({"ready": {name: importlib.metadata.version(name) for name in settings["distributions"]}})
    except Exception as error:
        tell({"error": text_of(error)})
        return
    for line in calls:
        call = json.loads(line)
        try:
            value = getattr(module, call["call"])(*map(given, call["arguments"]))
            answer = json.dumps({"value": plain(value)}).encode() + b"\n"
        except Exception as error:  # of a model's text, in functions of others
            tell({"error": text_of(error), "import": isinstance(error, ImportError)})
        else:
            answers.write(answer)
            answers.flush()


if __name__ == "__main__":
    main()
