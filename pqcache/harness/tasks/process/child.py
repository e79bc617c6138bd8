"""The program of every child process: python child.py <settings>. Standard library only, beside what it loads.

settings: JSON of what `isolate.enter` reads, or of {"how": null, "parent", "memory"} for a process that is bounded and no
more; "path": its `sys.path`; "longest": bytes of a line; "data_sets": whether these may cross.

stdout: the line `ready` when nothing more can be reached than `isolate` says. The first line of stdin says what is loaded:
{"text": program} or {"file": path}. Each line after it, (function, arguments, named arguments), has one line as its answer:
{"value": ...}, {"error": text}, or {"missing": text} where a package is. All are plain data, see `wire`. Without a function,
the answer is the versions of the packages that the arguments name. Whatever else the functions write is dropped.
"""

import importlib.util
import json
import os
import sys
import types
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import isolate
import wire

del sys.path[0]


def loaded(what: Any) -> types.ModuleType:
    """The module of a program or a file."""
    if "text" in what:
        module = types.ModuleType("__main__")
        exec(compile(what["text"], "program.py", "exec"), module.__dict__)
        return module
    spec = importlib.util.spec_from_file_location("functions", what["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["functions"] = module
    spec.loader.exec_module(module)
    return module


def versions(*names: str) -> dict[str, str]:
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in names}


def failure(error: BaseException) -> dict[str, str]:
    kind = "missing" if isinstance(error, ImportError) else "error"
    return {kind: " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def main() -> None:
    settings = json.loads(sys.argv[1])
    calls, answers, nowhere = open(os.dup(0), "rb"), os.dup(1), os.open(os.devnull, os.O_RDWR)  # noqa: SIM115
    isolate.enter(settings) if settings["how"] else isolate.bound(settings)
    for number in (0, 1, 2):  # only now: the parent reads on stderr what could not be isolated
        os.dup2(nowhere, number)
    os.close(nowhere)

    def tell(line: bytes) -> None:
        while line:
            line = line[os.write(answers, line) :]

    tell(b"ready\n")
    longest, data_sets = settings.get("longest", wire.LINE), settings.get("data_sets", False)
    sys.argv[:] = ["program"]
    sys.path[:] = settings.get("path", sys.path)
    functions: dict = {None: versions}
    module, failed = None, None
    try:
        module = loaded(wire.load(calls.readline()))
    except BaseException as error:
        failed = failure(error)
    for line in calls:
        try:
            name, arguments, named = wire.load(line, data_sets)
            if failed is None and name not in functions:
                functions[name] = getattr(module, name)
            answer = wire.dump(failed or {"value": functions[name](*arguments, **named)}, longest)
        except BaseException as error:  # of a program, or of a model's text in functions of others
            answer = wire.dump(failure(error))
        tell(answer)


if __name__ == "__main__":
    main()
