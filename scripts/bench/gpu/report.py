"""Targets of the GPU benchmark, and its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Targets are judged at this length only.
TARGET_LENGTH = 131_072


def targets(rows: dict[str, dict[str, Any]], s: int) -> list[dict[str, Any]]:
    """Each target at s tokens: length, what it compares, the ratio, and the largest ratio that meets it."""

    def tpot(name: str) -> float:
        """The recorded step's time where there is one, for full attention as for PQCache."""
        row = rows[name]
        return min(x for x in (row["step_ms"], row["recorded_ms"]) if x is not None)

    host, resident, full = rows["pqcache, host store"], rows["pqcache, resident store"], rows["full"]
    ratios = [("host store: TPOT / roofline", tpot("pqcache, host store") / host["roofline"]["roofline_ms"], 1.3)]
    if "step_ms" in rows.get("transformers, offloaded", {}):
        ratio = tpot("pqcache, host store") / tpot("transformers, offloaded")
        ratios.append(("host store: TPOT / transformers' offloaded cache", ratio, 0.1))
    ratios.append(("resident store: TPOT / full attention's", tpot("pqcache, resident store") / tpot("full"), 0.75))
    ratios.append(("resident store: TT2T / full attention's", resident["tt2t_s"] / full["tt2t_s"], 1.05))
    ratios.append(("host store: TT2T / full attention's", host["tt2t_s"] / full["tt2t_s"], 1.05))
    return [{"length": s, "what": what, "ratio": ratio, "target": target} for what, ratio, target in ratios]


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
    lengths = [int(s) for s in rows]
    for number, name in enumerate(next(iter(rows.values()))):
        for key, style in keys.items():
            values = [rows[str(s)].get(name, {}).get(key) for s in lengths]
            if any(values):
                label = name + (", recorded" if key == "recorded_ms" else "")
                known = [value or float("nan") for value in values]
                axis.plot(lengths, known, style, marker="o", color=f"C{number}", label=label)
    if "step_ms" in keys:
        bound = [rows[str(s)]["pqcache, host store"]["roofline"]["roofline_ms"] for s in lengths]
        axis.plot(lengths, bound, ":", color="black", label="roofline of the host store")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{s // 1024}K" if s >= 1024 else str(s) for s in lengths])
    axis.grid(alpha=0.3)
