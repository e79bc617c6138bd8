"""Draw docs/kept/<method>.svg: which tokens a method keeps and attends to, step by step.

    python scripts/draw_kept.py               write the pictures
    python scripts/draw_kept.py <folder>      write them there

Every picture is one real run of the method on a small random model: a prompt of 128 tokens and 24 decode steps, at a quarter of
the tokens. It shows one layer and one query head. Tokens go from left to right, steps from the top down.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pqcache.diagnostics.observe import Measures
from pqcache.diagnostics.trace import SUFFIX, TraceRecorder
from pqcache.registry import METHODS, method_class
from pqcache.selective import Budget, Method, SelectiveCache, WatchedCall, attach
from pqcache.selective.layer import SelectiveLayer, Watcher

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "kept"
PROMPT, STEPS = 128, 24
LAYER, HEAD = 1, 0
BUDGET = 0.25
EXACT = 16  # bits; other numbers are of codes
# Sizes that suit a short prompt. All other options are at their defaults.
SMALL: dict[str, dict[str, Any]] = {
    "oracle": {"n_sink": 4},
    "pqcache": {"n_sink": 4, "b": 4},
    "quest": {"page": 8},
    "sparq": {"n_sink": 4, "r": 4},
    "clusterkv": {"n_sink": 4, "tokens_per_cluster": 8, "window": 8, "window_clusters": 2},
    "two_stage": {"n_sink": 4, "first_options": {"page": 8}, "second_options": {"b": 4}, "shortlist": 2.0},
    "infinigen": {"calibration_tokens": 64},
    "double_sparsity": {"n_sink": 4, "calibration_tokens": 64},
    "infllm": {"n_init": 4, "block": 8, "exc_block": 4},
    "streaming": {"n_sink": 4},
    "snapkv": {"n_sink": 4, "w": 8, "kernel": 5},
    "pyramidkv": {"n_sink": 4},
    "h2o": {"n_sink": 4},
    "h2o_c": {"n_sink": 4},
    "kvcrush": {"base_options": {"n_sink": 4, "w": 8}},
    "kvcrush_mixed": {"bits": 4, "group": 8, "base_options": {"n_sink": 4, "w": 8}},
    "zipcache": {"gap": 8},
    "mikv": {"gap": 8},
    "kivi": {"group": 8, "residual": 24},
    "gear": {"residual": 8},
    "coded": {"policy_options": {"n_sink": 4, "b": 4}, "codec_options": {"gap": 8}},
    "evict_retrieve": {"evict_options": {"n_sink": 4, "w": 8}, "keep": 0.6, "retrieve_options": {"n_sink": 4, "b": 3}},
}
OWN_BUDGET = {"double_sparsity": BUDGET, "zipcache": 0.2, "mikv": 0.2, "coded": 0.2}

# A cell is (kept, attended, bits). Colours are told apart with any colour vision; codes are orange, exact tokens blue.
ATTENDED = {EXACT: "#0072B2", 8: "#8F4A00", 4: "#D98200", 2: "#F2B84B"}
KEPT = {EXACT: "#C9DFEE", 8: "#E3CDB5", 4: "#F1DDBC", 2: "#FBF0D6"}
DROPPED = "#F1F1F1"

Cell = tuple[bool, bool, int]


def small_model() -> PreTrainedModel:
    """A random Llama in float64: 3 layers, 4 query heads of 16 dimensions, 2 KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # the default start attends almost evenly
    return model


class Seen(Measures):
    """Writes down, for one layer and query head, what each decode step attended and what was kept after it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[Cell]] = []

    def watch(self, call: WatchedCall) -> None:
        layer, step = call.layer, call.ctx.step
        if layer.layer_idx != LAYER:
            return
        length = step.total[0]
        if step.decode:
            # the widths of what this step read: one that is packed when the step ends was read exactly
            attended, _ = self._attended(layer, call.q.shape[1], length, call.ctx)
            assert attended is not None
            read = attended[0, HEAD].tolist()
            kept = self.holds(layer, length)
            self.steps.append([(at in kept or read[at], read[at], kept.get(at, EXACT)) for at in range(length)])
        held = layer.held_positions()
        self.held[LAYER] = None if held is None else held.clone()

    def holds(self, layer: SelectiveLayer, length: int) -> dict[int, int]:
        """Position -> bits of the tokens that the layer keeps for the query head."""
        held = layer.held_positions()
        head = 0 if held is None else HEAD * held.shape[1] // layer.shape.h
        entries = list(range(length)) if held is None else held[0, head].tolist()
        bits = entry_bits(layer, len(entries))
        return {at: bits[i] for i, at in enumerate(entries) if at >= 0}


def entry_bits(layer: Any, count: int) -> list[int]:
    """How many bits the numbers of each of a layer's entries have (those of its keys)."""
    store = getattr(layer, "store", None)
    packed = getattr(store, "packed", store)  # of a store with a packed and an exact part
    stream = getattr(packed, "k", None)
    body = getattr(stream, "body", None)
    if not body:
        return [EXACT] * count
    widths = getattr(packed, "widths", None)
    if widths is None:
        return [stream.codec.bits] * body[0] + [EXACT] * (count - body[0])
    low, high = (subset.bits for subset in stream.codec.subsets)  # regular tokens, salient ones
    salient = widths.bits()[0, 0, : body[0]].tolist()
    return [high if mark else low for mark in salient] + [EXACT] * (count - body[0])


def ids() -> torch.Tensor:
    """The prompt and the tokens that follow it: (1, PROMPT + STEPS)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 128, (1, PROMPT + STEPS), generator=generator)


@torch.no_grad()
def run(model: PreTrainedModel, method: Method, watcher: Watcher) -> None:
    """Prefill the prompt and feed the other tokens one by one, whatever the model would answer."""
    tokens = ids()
    if any(type(part).__dict__.get("prepare") for part in (method, *method.parts())):
        method.prepare(model, tokens, None)
    cache = SelectiveCache(model, method)
    cache.watchers.append(watcher)
    cache.begin([PROMPT], token_ids=tokens[:, :PROMPT], max_new_tokens=STEPS)
    try:
        with attach(model):
            for block in (tokens[:, :PROMPT], *tokens[:, PROMPT:].split(1, dim=1)):
                model(input_ids=block, past_key_values=cache, use_cache=True, logits_to_keep=1)
    finally:
        cache.lanes.close()


def seen(name: str, model: PreTrainedModel) -> list[list[Cell]]:
    """What a method kept and attended at each step: per step, a cell per token so far."""
    watcher = Seen()
    budget = Budget(ratio=OWN_BUDGET.get(name, BUDGET))
    if name != "replay":
        run(model, method_class(name)(budget=budget, **SMALL.get(name, {})), watcher)
        return watcher.steps
    with tempfile.TemporaryDirectory() as folder:  # what PQCache selected, recorded and attended again
        recorder = TraceRecorder()
        run(model, method_class("pqcache")(budget=budget, **SMALL["pqcache"]), recorder)
        recorder.save(Path(folder) / f"pqcache{SUFFIX}")
        run(model, method_class("replay")(trace=folder), watcher)
    return watcher.steps


# -- the picture -------------------------------------------------------------------------------------------------------

WIDE, HIGH, TOP, LEFT = 5, 7, 34, 44  # pixels of a cell and of the margins


def colour(cell: Cell) -> str:
    kept, attended, bits = cell
    if not kept:
        return DROPPED
    return (ATTENDED if attended else KEPT)[bits]


def word(cell: Cell) -> str:
    kept, attended, bits = cell
    if not kept:
        return "dropped"
    return ("attended" if attended else "kept, not attended") + ("" if bits == EXACT else f", {bits} bits")


def svg(name: str, steps: list[list[Cell]]) -> str:
    """The picture of one method: a path per colour, whose lines are runs of cells."""
    width, height = LEFT + WIDE * (PROMPT + STEPS) + 8, TOP + HIGH * len(steps) + 22
    paths: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    for row, cells in enumerate(steps):
        at = 0
        for cell, group in groupby(cells):
            count = len(list(group))
            paths.setdefault(colour(cell), []).append(f"M{at} {row}h{count}")
            words[colour(cell)] = word(cell)
            at += count
    order = [c for c in (*ATTENDED.values(), *KEPT.values(), DROPPED) if c in paths]
    text = 'font-family="sans-serif" font-size="11" fill="#333"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{name}: tokens kept and attended at {len(steps)} decode steps</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    x = LEFT
    for shade in order:
        lines.append(f'<rect x="{x}" y="8" width="11" height="11" fill="{shade}"/>')
        lines.append(f'<text x="{x + 15}" y="18" {text}>{words[shade]}</text>')
        x += 32 + round(5.9 * len(words[shade]))
    lines.append(
        f'<g transform="translate({LEFT} {TOP + HIGH / 2}) scale({WIDE} {HIGH})" fill="none" stroke-width="0.86">'
    )
    lines += [f'<path stroke="{shade}" d="{"".join(paths[shade])}"/>' for shade in order]
    bottom, edge = TOP + HIGH * len(steps), LEFT + WIDE * PROMPT
    lines += [
        "</g>",
        f'<path d="M{edge} {TOP - 3}V{bottom + 3}" stroke="#333" stroke-dasharray="3 2"/>',
        f'<text x="{LEFT}" y="{bottom + 15}" {text}>prompt, {PROMPT} tokens</text>',
        f'<text x="{edge + 4}" y="{bottom + 15}" {text}>generated</text>',
        f'<text x="{LEFT - 6}" y="{TOP + 9}" text-anchor="end" {text}>step 1</text>',
        f'<text x="{LEFT - 6}" y="{bottom - 1}" text-anchor="end" {text}>{len(steps)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def pictures(names: Iterable[str] = METHODS) -> dict[str, str]:
    """Method -> its picture."""
    torch.set_num_threads(1)
    model = small_model()
    return {name: svg(name, seen(name, model)) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
