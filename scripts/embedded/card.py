"""The model card: README.md, written from training.json and measured.json of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pqcache.atomic import write_text

_TEXT = """# The embedded model

A Qwen2 model of {parameters:.1f} million parameters ({layers} layers, hidden size {hidden}, {heads} query heads on
{kv_heads} key/value heads of dimension {head_dim}, contexts to {context}) with a byte-level BPE tokenizer of {vocab} entries. It
does one thing: it finds sentences such as `The <key> is <value>.` in a long text and restates them when asked
`What is the <key>?`.{families} It was made to tell KV-cache methods apart without a download. It knows no facts, follows no
other instruction, and writes nothing of its own.

    tokenizer.apply_chat_template([{{"role": "user", "content": text}}], add_generation_prompt=True)
    # <bos> text <answer>     the answer ends with <eos>

## Training

`python scripts/embedded/train.py` trains it from nothing but this repository and the Python standard library:

{runs}

- Data, all made on the fly (`scripts/embedded/training_rows.py`): sentences with pseudo-word, random-token and prose-word keys
  and values, many keys near-duplicates of another; as filler generated sentences, prose of the Python language reference
  and stdlib docstrings, shuffled words, random tokens. No other text.
- Held out: a quarter of all pseudo-words by hash. `needle_pocket` uses only these; training rows that hold one are
  rejected (`tests/embedded/test_held_out.py`).
- Start: look-back and matching heads are put in place before training (`scripts/embedded/network.py`); all weights are trained.
- Loss on answer tokens; position ids jump in half of the rows, up to {context}.
{notes}
![learning curve](learning_curve.png)

## Measured

Free-running greedy generation, full cache, float32 arithmetic on the shipped bf16 weights.

{measured}
## Limits

Only copying is learned: questions must repeat the words before "is" as they stand in the text. Two sentences with the same key,
or keys that differ only in words more than six tokens before the value, are mixed up. Scores fall with length (table), and
beyond the lengths measured nothing is promised.
"""


_CHAIN_TEXT = """# The embedded model for long answers

A Qwen2 model of {parameters:.1f} million parameters ({layers} layers, hidden size {hidden}, {heads} query heads on
{kv_heads} key/value heads of dimension {head_dim}, contexts to {context}) that does `task=long_chain` and nothing else
(`pqcache/embedded/long_chain.py`): it follows pointers through a table in its prompt, and finds again what its own answer
wrote hundreds of tokens ago. It uses the tokenizer in `pqcache/embedded/weights`.

## Training

`python scripts/embedded/train.py` trains it from nothing but this repository:

{runs}

- Data, all made on the fly (`scripts/embedded/chain_rows.py`): one walk per row, of training words alone. `task=long_chain` uses
  the quarter of all pseudo-words that is held out.
- Start: look-back and matching heads are put in place before training (`scripts/embedded/network.py`, `skip`); all weights are
  trained.
- Loss on answer tokens; position ids jump in half of the rows, up to {context}.
{notes}
![learning curve](learning_curve.png)

## Measured

Free-running greedy generation, full cache, float32 arithmetic on the shipped bf16 weights. Shares of steps in percent; the
columns are those of `task=long_chain` ([tasks](../../../docs/tasks.md)).

{measured}
"""


def _chain_table(measured: dict[str, Any]) -> str:
    cells = measured.get("long_chain")
    if not cells:
        return "Nothing measured yet: `python scripts/embedded/measure.py --chain`.\n"
    keys = [key for key in next(iter(cells.values())) if key != "n"]
    lines = [f"| answer tokens | samples | {' | '.join(keys)} |", f"|---|---|{'---|' * len(keys)}"]
    for length, cell in sorted(cells.items(), key=_length):
        lines.append(f"| {length} | {cell['n']} | {' | '.join(f'{cell[key]:.1f}' for key in keys)} |")
    return "\n".join(lines)


def _length(item: tuple[str, Any]) -> int:
    return int(item[0])


def _measured_table(measured: dict[str, Any]) -> str:
    parts = []
    if pocket := measured.get("needle_pocket"):
        parts.append("| needle_pocket, tokens | samples | score | fully right |\n|---|---|---|---|")
        parts += [
            f"| {k} | {v['n']} | {v['score']:.1f} | {v['whole']:.1f} % |"
            for k, v in sorted(pocket.items(), key=_length)
        ]
        parts.append("")
    if families := measured.get("pocket"):
        names = list(next(iter(families.values())))
        parts.append("PocketBench, official metric of each family, share of fully right answers in brackets:\n")
        parts.append(f"| tokens | samples each | mean | {' | '.join(names)} |\n|---|---|---|{'---|' * len(names)}")
        for length, cells in sorted(families.items(), key=_length):
            mean = sum(cells[k]["score"] for k in names) / len(names)
            each = " | ".join(f"{cells[k]['score']:.0f} ({cells[k]['whole']:.0f})" for k in names)
            parts.append(f"| {length} | {cells[names[0]]['n']} | {mean:.1f} | {each} |")
        parts.append("\n![score per family and length](measured.png)\n")
    if prose := measured.get("prose_needle"):
        parts.append("Keyword accuracy of one needle in essays (never trained on), by depth from start to end:\n")
        parts.append("| tokens | per depth | mean |\n|---|---|---|")
        for length, scores in sorted(prose.items(), key=_length):
            mean = sum(scores) / len(scores)
            parts.append(f"| {length} | {' '.join(f'{s:.0f}' for s in scores)} | {mean:.1f} |")
        parts.append("")
    return "\n".join(parts) if parts else "Nothing measured yet: `python scripts/embedded/measure.py --samples 50`.\n"


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
    families = (
        " It also answers the eight families of PocketBench (`pqcache/embedded/families.py`)."
        if measured.get("pocket")
        else ""
    )
    chain = training["recipe"].get("rows") == "chain"
    text = (_CHAIN_TEXT if chain else _TEXT).format(
        parameters=training["parameters"] / 1e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        context=config["max_position_embeddings"],
        vocab=config["vocab_size"],
        families=families,
        runs="\n".join(_run(run) for run in runs),
        notes="".join(f"- {note}\n" for note in notes),
        measured=_chain_table(measured) if chain else _measured_table(measured),
    )
    write_text(folder / "README.md", text)
