"""Word problems in the format of GSM8K's rows: `question`, and an `answer` with calculator marks and a #### line."""

from __future__ import annotations

from random import Random

_NAMES = "Anna Boris Clara David Emil Fatima Georg Hanna Igor Julia".split()
_THINGS = "apples stamps marbles pencils shells coins cards buttons".split()


def problem(rng: Random, steps: int) -> dict[str, str]:
    """One problem whose answer has `steps` lines of reasoning; every number on the way is positive."""
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    count = rng.randint(5, 30)
    story, reasoning = [f"{name} has {count} {things}."], []
    for _ in range(steps):
        before = count
        kind = rng.choice(("more", "less", "times")) if count < 500 else "less"
        if kind == "less" and count < 4:
            kind = "more"
        if kind == "more":
            n = rng.randint(2, 40)
            count = before + n
            story.append(f"Then {name} buys {n} {things}.")
            line = f"{before} + {n} = <<{before}+{n}={count}>>{count}"
        elif kind == "less":
            n = rng.randint(1, before - 2)
            count = before - n
            story.append(f"Then {name} gives away {n} {things}.")
            line = f"{before} - {n} = <<{before}-{n}={count}>>{count}"
        else:
            n = rng.randint(2, 3)
            count = before * n
            story.append(f"After a year there are {n} times as many.")
            line = f"{before} * {n} = <<{before}*{n}={count}>>{count}"
        reasoning.append(f"{name} now has {line} {things}.")
    question = " ".join([*story, f"How many {things} does {name} have now?"])
    return {"question": question, "answer": "\n".join([*reasoning, f"#### {count}"])}


def numbered_problem(seed: int, number: int) -> dict[str, str]:
    """One problem in place of a row of the test split."""
    return problem(Random(f"gsm8k/{seed}/test/{number}"), 2 + number % 5)
