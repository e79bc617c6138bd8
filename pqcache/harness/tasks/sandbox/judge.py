"""The process that runs a data set's tests: python judge.py <settings>. It never executes the program that it judges.

stdin: {"helpers", "tests", "entry_point"} as JSON. `helpers` is the prompt: functions that tests use beside the candidate.
The tests' `check` is called with a function that asks the candidate's process through two pipes. stdout: a line when both
processes are ready, then the verdict: "passed", or why not.
"""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import isolate
import wire

del sys.path[0]


class Candidate:
    """The function under test, in another process."""

    def __init__(self, answers: int, calls: int) -> None:
        self._answers = open(answers, "rb")  # noqa: SIM115 - the process ends with it
        self._calls = calls

    def line(self) -> bytes:
        line = self._answers.readline(wire.LINE + 1)
        if not line.endswith(b"\n"):
            raise RuntimeError("the program ended" if len(line) <= wire.LINE else "the program's answer is too long")
        return line

    def __call__(self, *arguments: object, **named: object) -> object:
        line = wire.dump((arguments, named))
        while line:
            line = line[os.write(self._calls, line) :]
        answer = wire.load(self.line())
        if not isinstance(answer, dict) or len(answer) != 1:
            raise RuntimeError("not an answer")
        if "value" in answer:
            return answer["value"]
        raise RuntimeError(f"the program raised {answer.get('error')}")


def main() -> None:
    text = json.loads(sys.stdin.buffer.read())
    settings, nowhere, report = json.loads(sys.argv[1]), isolate.silence(), os.dup(1)
    isolate.enter(settings)
    isolate.quiet(nowhere)
    candidate = Candidate(settings["reads"], settings["writes"])
    try:
        if candidate.line() != b"ready\n":
            raise RuntimeError("the program's process did not start")
        os.write(report, b"ready\n")
        names: dict = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(text["helpers"], "helpers.py", "exec"), names)
        names[text["entry_point"]] = candidate
        exec(compile(text["tests"], "tests.py", "exec"), names)
        names["check"](candidate)
    except BaseException as error:
        verdict = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    else:
        verdict = "passed"
    os.write(report, verdict.encode(errors="replace") + b"\n")


if __name__ == "__main__":
    main()
