"""The model card: README.md, written from training.json and measured.json of the same folder into card.txt or chain_card.txt."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pqcache.atomic import write_text

FAMILIES = " It also answers the eight families of PocketBench (`pqcache/embedded/families.py`)."


def _table(columns: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    rows = ["| " + " | ".join(map(str, line)) + " |\n" for line in lines]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n{''.join(rows)}"


def _by_length(cells: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(cells.items(), key=lambda item: int(item[0]))


def _chain_table(measured: dict[str, Any]) -> str:
    if not (cells := measured.get("long_chain")):
        return "Nothing measured yet: `python scripts/embedded/measure.py --chain`.\n"
    keys = [key for key in next(iter(cells.values())) if key != "n"]
    lines = [(length, cell["n"], *(f"{cell[key]:.1f}" for key in keys)) for length, cell in _by_length(cells)]
    return _table(["answer tokens", "samples", *keys], lines).rstrip("\n")


def _measured_tables(measured: dict[str, Any]) -> str:
    parts = []
    if needle := measured.get("needle_pocket"):
        lines = [(k, v["n"], f"{v['score']:.1f}", f"{v['whole']:.1f} %") for k, v in _by_length(needle)]
        parts.append(_table(["needle_pocket, tokens", "samples", "score", "fully right"], lines))
    if families := measured.get("pocket"):
        names = list(next(iter(families.values())))
        lines = []
        for length, cells in _by_length(families):
            mean = sum(cells[k]["score"] for k in names) / len(names)
            each = (f"{cells[k]['score']:.0f} ({cells[k]['whole']:.0f})" for k in names)
            lines.append((length, cells[names[0]]["n"], f"{mean:.1f}", *each))
        head = "PocketBench, official metric of each family, share of fully right answers in brackets:\n\n"
        picture = "\n![score per family and length](measured.png)\n"
        parts.append(head + _table(["tokens", "samples each", "mean", *names], lines) + picture)
    if prose := measured.get("prose_needle"):
        lines = [(k, " ".join(f"{s:.0f}" for s in v), f"{sum(v) / len(v):.1f}") for k, v in _by_length(prose)]
        head = "Keyword accuracy of one needle in essays (never trained on), by depth from start to end:\n\n"
        parts.append(head + _table(["tokens", "per depth", "mean"], lines))
    return "\n".join(parts) or "Nothing measured yet: `python scripts/embedded/measure.py --samples 50`.\n"


def _run(run: dict[str, Any]) -> str:
    """One training run in a few lines."""
    recipe = run["recipe"]
    stages = "; ".join(
        f"to {s['until']:.0%}: {s['length']} x {s['rows']}"
        + (f", {s['query_share']:.0%}" if s["query_share"] else "")
        + (f", {s['family_rows']:.0%} families" if s.get("family_rows") else "")
        for s in recipe["stages"]
    )
    shares = ", share of question and answer tokens" if recipe["stages"][0]["query_share"] else ""
    decay = f", linear decay from {recipe['decay_from']:.0%} of the run on" if recipe["decay_from"] < 1 else ""
    return (
        f"- `--recipe {run.get('recipe_name') or 'needle'}`: {run['tokens'] / 1e6:.1f} million tokens in {run['steps']} steps"
        f" ({run['minutes'] / 60:.1f} hours; {run['device']}; seed {run['seed']}; heads of {run.get('head_dim') or 64}).\n"
        f"  Stages (share of the run, tokens per row x rows{shares}): {stages}.\n"
        f"  AdamW, learning rate {recipe['lr']}{decay}, bf16 autocast."
    )


def write_card(folder: Path) -> None:
    """Writes README.md; needs config.json and training.json, uses measured.json if it is there."""
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    path = folder / "measured.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    runs = [*training.get("earlier", []), training]
    notes = [note for run in runs for note in run["notes"] or []]
    chain = training["recipe"].get("rows") == "chain"
    template = Path(__file__).with_name("chain_card.txt" if chain else "card.txt").read_text(encoding="utf-8")
    text = template.format(
        parameters=training["parameters"] / 1e6,
        **config,
        families=FAMILIES if measured.get("pocket") else "",
        runs="\n".join(_run(run) for run in runs),
        notes="".join(f"- {note}\n" for note in notes),
        measured=(_chain_table if chain else _measured_tables)(measured),
    )
    write_text(folder / "README.md", text)
