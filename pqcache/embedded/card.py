"""The model card: README.md, written from training.json and measured.json of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEXT = """# The embedded model

A Qwen2 model of {parameters:.1f} million parameters ({layers} layers, hidden size {hidden}, {heads} query heads on
{kv_heads} key/value heads of dimension {head_dim}, contexts to {context}) with a byte-level BPE tokenizer of {vocab} entries. It
does one thing: it finds a sentence `The <key> is <value>.` in a long text and restates it when asked `What is the <key>?`. It was
made to tell KV-cache methods apart without a download. It knows no facts, follows no other instruction, and writes
nothing of its own.

    tokenizer.apply_chat_template([{{"role": "user", "content": text}}], add_generation_prompt=True)
    # <bos> text <answer>     the answer ends with <eos>

## Training

`python scripts/train_embedded.py --minutes {minutes_planned:.0f}` trains it from nothing but this repository and the Python
standard library. This one saw {tokens:.1f} million tokens in {steps} steps ({minutes:.0f} minutes;\n{device}; seed {seed}).

- Data, all made on the fly (`pqcache/embedded/training.py`): sentences with pseudo-word, random-token and prose-word keys and
  values, many keys near-duplicates of another; as filler generated sentences, prose of the Python language reference
  and stdlib docstrings, shuffled words, random tokens. No other text.
- Held out: a quarter of all pseudo-words by hash. `needle_pocket` uses only these; training rows that hold one are
  rejected (`tests/embedded/test_held_out.py`).
- Start: look-back and matching heads are put in place before training (`pqcache/embedded/network.py`); all weights are trained.
- Loss on answer tokens; position ids jump in half of the rows, up to {context}.
- Stages (share of the training, tokens per row x rows, share of question and answer tokens): {stages}.
- AdamW, learning rate {lr}, linear decay from {decay_from:.0%} of the training on, bf16 autocast.
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
    if prose := measured.get("prose_needle"):
        parts.append("Keyword accuracy of one needle in essays (never trained on), by depth from start to end:\n")
        parts.append("| tokens | per depth | mean |\n|---|---|---|")
        for length, scores in sorted(prose.items(), key=_length):
            mean = sum(scores) / len(scores)
            parts.append(f"| {length} | {' '.join(f'{s:.0f}' for s in scores)} | {mean:.1f} |")
        parts.append("")
    return "\n".join(parts) if parts else "Nothing measured yet: `python scripts/train_embedded.py --measure 50`.\n"


def write_card(folder: Path) -> None:
    """Writes README.md; needs config.json and training.json, uses measured.json if it is there."""
    config = json.loads((folder / "config.json").read_text())
    training = json.loads((folder / "training.json").read_text())
    path = folder / "measured.json"
    measured = json.loads(path.read_text()) if path.exists() else {}
    recipe = training["recipe"]
    stages = "; ".join(
        f"to {s['until']:.0%}: {s['length']} x {s['rows']}, {s['query_share']:.0%}" for s in recipe["stages"]
    )
    text = _TEXT.format(
        parameters=training["parameters"] / 1e6,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        context=config["max_position_embeddings"],
        vocab=config["vocab_size"],
        minutes_planned=max(training["minutes"], 1),
        tokens=training["tokens"] / 1e6,
        steps=training["steps"],
        minutes=training["minutes"],
        device=training["device"],
        seed=training["seed"],
        stages=stages,
        lr=recipe["lr"],
        decay_from=recipe["decay_from"],
        notes="".join(f"- {note}\n" for note in training["notes"]),
        measured=_measured_table(measured),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
