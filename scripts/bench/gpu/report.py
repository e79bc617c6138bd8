"""Targets of the GPU benchmark, its summary and its pictures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Targets are judged at this length only.
TARGET_LENGTH = 131_072
# Facts of a measurement, not of its time: they are not repeated in the summary.
_FACTS = ("measurement", "at", "kind", "method", "mode", "prompt_tokens", "batch", "dtype")


def caption_of(facts: Row, args: argparse.Namespace) -> str:
    """Machine, versions and sizes in one sentence."""
    geometry = (
        f"Mistral geometry{' (tiny)' if args.tiny else ''}, {args.layers} layers, random weights, budget {args.budget}"
    )
    if "device" not in facts:
        return f"machine unknown; {geometry}"
    return (
        f"{facts['device']}; torch {facts['torch']}, triton {facts.get('triton', 'not installed')}, transformers"
        f" {facts['transformers']}; copy {facts['copy_gb_s']:.0f} GB/s (read + written), link {facts['link_gb_s']:.1f} GB/s;"
        f" {geometry}, batch 1"
    )


def tables(rows: list[Row], args: argparse.Namespace, methods: list[str]) -> dict[str, dict[str, Row]]:
    """Prompt length -> method -> its figures: `step_ms` of steps from Python, `recorded_ms` of recorded ones."""
    tables: dict[str, dict[str, Row]] = {}
    kinds = [row for row in rows if row.get("kind") == "decode" and row.get("dtype") != "bfloat16"]
    for row in kinds:
        table = tables.setdefault(str(row["prompt_tokens"]), {})
        own = table.setdefault(row["method"], {"recorded_ms": None})
        if row.get("not_applicable"):
            own["failed"] = row["not_applicable"]
        elif row["mode"] == "recorded":
            own["recorded_ms"] = row["tpot_ms"]
            own |= {key: row[key] for key in ("not_recorded",) if key in row}
        else:
            own |= {key: value for key, value in row.items() if key not in (*_FACTS, "tpot_ms", "tpot_p95_ms")}
            own["step_ms"] = row["tpot_ms"]
            if "tpot_p95_ms" in row:
                own["step_p95_ms"] = row["tpot_p95_ms"]
    for row in rows:
        length, _, method = row["measurement"].partition(": ")
        if "failed" in row and length in map(str, args.lengths) and method in methods:
            tables.setdefault(length, {}).setdefault(method, {})["failed"] = row["failed"]
    return tables


def conclude(rows: list[Row], args: argparse.Namespace, methods: list[str], taken: float) -> int:
    """Judge the targets, write the summary and the pictures; the command's exit code."""
    facts = next((row for row in rows if row.get("kind") == "machine"), {})
    caption = caption_of(facts, args)
    figures: Row = {
        "caption": caption,
        "machine": {key: value for key, value in facts.items() if key not in (*_FACTS, "slug")},
        "tiny": args.tiny,
        "lengths": tables(rows, args, methods),
        "targets": [],
    }
    checked = {row["kernel"]: row for row in rows if row.get("kind") == "kernel" and "ok" in row}
    if checked:
        figures["kernels"] = {
            name: {key: value for key, value in row.items() if key not in (*_FACTS, "kernel")}
            for name, row in checked.items()
        }
    for s, table in figures["lengths"].items():
        figures["targets"] += targets(table, int(s))
    print()
    judge(figures["targets"], args.tiny)
    for reason in sorted({row["not_recorded"] for row in rows if "not_recorded" in row}):
        print(f"steps not recorded: {reason}")
    folder = args.base / facts.get("slug", "unknown")
    folder.mkdir(parents=True, exist_ok=True)
    figures["seconds"] = taken
    (folder / "bench_gpu.json").write_text(json.dumps(figures, indent=1))
    try:
        draw(figures, folder)
    except Exception as error:  # the figures are written; a picture can be drawn again
        print(f"no pictures: {type(error).__name__}: {error}")
    print(f"{caption}\n{taken:.0f} s; written to {folder}")
    for row in rows:
        if "failed" in row:
            print(f"FAILED: {row['measurement']}: {row['failed']}")
    if left := [row["measurement"] for row in rows if "left_out" in row]:
        print(f"left out, {args.minutes:g} minutes are over: {', '.join(left)}")
    wrong = [name for name, row in checked.items() if not row["ok"]]
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return 1 if wrong or any("failed" in row for row in rows) else 0


def targets(rows: dict[str, Row], s: int) -> list[Row]:
    """Each target at s tokens whose rows were measured: length, what it compares, the ratio, and the largest that meets it."""

    def tpot(name: str) -> float | None:
        """The recorded step's time where there is one, for full attention as for PQCache."""
        row = rows.get(name, {})
        return min((x for x in (row.get("step_ms"), row.get("recorded_ms")) if x is not None), default=None)

    def tt2t(name: str) -> float | None:
        return rows.get(name, {}).get("tt2t_s")

    host, resident, offloaded = "pqcache, host store", "pqcache, resident store", "transformers, offloaded"
    bound = rows.get(host, {}).get("roofline", {}).get("roofline_ms")
    pairs = [
        ("host store: TPOT / roofline", tpot(host), bound, 1.3),
        ("host store: TPOT / transformers' offloaded cache", tpot(host), tpot(offloaded), 0.1),
        ("resident store: TPOT / full attention's", tpot(resident), tpot("full"), 0.75),
        ("resident store: TT2T / full attention's", tt2t(resident), tt2t("full"), 1.05),
        ("host store: TT2T / full attention's", tt2t(host), tt2t("full"), 1.05),
    ]
    known = [(what, ours / other, target) for what, ours, other, target in pairs if ours is not None and other]
    return [{"length": s, "what": what, "ratio": ratio, "target": target} for what, ratio, target in known]


def judge(compared: list[dict[str, Any]], tiny: bool) -> None:
    """Print every target and set its `met`; None where it is not judged."""
    for target in compared:
        target["met"] = target["ratio"] <= target["target"]
        verdict = "met" if target["met"] else "NOT met"
        if tiny or target["length"] != TARGET_LENGTH:
            target["met"], verdict = None, "not judged at this size"
        limit = f"{target['ratio']:.3f}, target {target['target']}"
        print(f"{target['length']:>7} tokens, {target['what']}: {limit}: {verdict}")


def draw(figures: dict[str, Any], folder: Path) -> None:
    """Decode time and TT2T over the prompt's length, as PNG; nothing where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no pictures")
        return
    for file, title, keys in (
        ("bench_gpu_tpot.png", "milliseconds per decode step", {"recorded_ms": "-", "step_ms": "--"}),
        ("bench_gpu_tt2t.png", "seconds to the second token", {"tt2t_s": "-"}),
    ):
        figure = Figure(figsize=(7, 4.5))
        FigureCanvasAgg(figure)
        axis = figure.subplots()
        plot(axis, figures["lengths"], keys)
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel(title)
        axis.legend(fontsize=7)
        figure.text(0.01, 0.01, figures["caption"], fontsize=6, wrap=True)
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        figure.savefig(folder / file, dpi=150)


def plot(axis: Any, rows: dict[str, dict[str, dict[str, Any]]], keys: dict[str, str]) -> None:
    """A line per method and key (key -> line style) over the lengths, and the host store's roofline under times of steps."""
    lengths = sorted(int(s) for s in rows)
    for number, name in enumerate(dict.fromkeys(name for table in rows.values() for name in table)):
        for key, style in keys.items():
            values = [rows[str(s)].get(name, {}).get(key) for s in lengths]
            if any(values):
                label = name + (", recorded" if key == "recorded_ms" else "")
                known = [value or float("nan") for value in values]
                axis.plot(lengths, known, style, marker="o", color=f"C{number}", label=label)
    if "step_ms" in keys:
        stored = [rows[str(s)].get("pqcache, host store", {}).get("roofline", {}) for s in lengths]
        bound = [one.get("roofline_ms", float("nan")) for one in stored]
        axis.plot(lengths, bound, ":", color="black", label="roofline of the host store")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{s // 1024}K" if s >= 1024 else str(s) for s in lengths])
    axis.grid(alpha=0.3)
