"""The process that executes a program a model wrote, and answers calls of its function: python candidate.py <settings>.

stdin: {"program", "entry_point"} as JSON. The judge's calls come through one pipe, the answers go through another. An answer
is {"value": ...} or {"error": "..."}, both plain data.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import isolate
import wire

del sys.path[0]


def main() -> None:
    text = json.loads(sys.stdin.buffer.read())
    settings, nowhere = json.loads(sys.argv[1]), isolate.silence()
    isolate.enter(settings)
    isolate.quiet(nowhere)
    os.write(settings["writes"], b"ready\n")
    sys.argv[:] = ["program"]
    calls = open(settings["reads"], "rb")  # noqa: SIM115 - the process ends with it
    names: dict = {"__name__": "__main__", "__builtins__": __builtins__}
    failed = None
    try:
        exec(compile(text["program"], "program.py", "exec"), names)
        function = names[text["entry_point"]]
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"[:300]
    for line in calls:
        if failed is not None:
            answer = {"error": failed}
        else:
            try:
                arguments, named = wire.load(line)
                answer = {"value": function(*arguments, **named)}
                answer = wire.dump(answer)
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        line = answer if isinstance(answer, bytes) else wire.dump(answer)
        while line:
            line = line[os.write(settings["writes"], line) :]


if __name__ == "__main__":
    main()
