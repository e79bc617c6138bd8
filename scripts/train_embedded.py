"""Trains the small model shipped in `pqcache/embedded/weights`, from nothing but this repository and Python.

    python scripts/train_embedded.py --minutes 90                       # all stages, two CPU cores are enough
    python scripts/train_embedded.py --minutes 90 --work /tmp/train     # the same command again resumes after a kill
    python scripts/train_embedded.py --init pqcache/embedded/weights --minutes 30 --first-stage 3   # train on
    python scripts/train_embedded.py --recipe families --init <needle's out> --minutes 60 --out <folder>
    python scripts/train_embedded.py --recipe long --init <families' out> --head-dim 128 --minutes 60
    python scripts/train_embedded.py --device cuda --minutes 20
    python scripts/train_embedded.py --measure 150 --haystack <folder of .txt files>   # scores into the model card

Needs torch and transformers (matplotlib for the picture of the learning curve, if it is there). The last checkpoint is
in `--work`; weights, tokenizer, learning curve and model card go to `--out`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed, too

from pqcache.atomic import replacing, write_text  # noqa: E402
from pqcache.embedded import card, documents, measure, network, prose, tokenizer, training  # noqa: E402
from pqcache.embedded.families import FAMILIES  # noqa: E402
from pqcache.embedded.training import Stage  # noqa: E402


@dataclass(frozen=True)
class Recipe:
    """Everything that is not a command line choice."""

    stages: tuple[Stage, ...] = (
        Stage(until=0.06, length=256, rows=32, query_share=0.45),
        Stage(until=0.14, length=512, rows=16, query_share=0.45),
        Stage(until=0.34, length=1024, rows=8, query_share=0.45),
        Stage(until=0.66, length=2048, rows=4, query_share=0.4),
        Stage(until=0.95, length=4096, rows=2, query_share=0.2),
        Stage(until=1.00, length=8192, rows=1, query_share=0.1),
    )
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 512
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup_steps: int = 50
    decay_from: float = 0.75  # share of the training after which the learning rate falls linearly to 2 %
    watch_lengths: tuple[int, ...] = (1024, 2048)
    watch_samples: int = 10
    watch_families: tuple[
        str, ...
    ] = ()  # PocketBench families whose fully right answers are counted at the first length


FAMILY = Recipe(  # after "needle": the families of PocketBench
    stages=(
        Stage(until=0.5, length=512, rows=8, query_share=0.45, family_rows=0.8),
        Stage(until=0.9, length=1024, rows=4, query_share=0.45, family_rows=0.8),
        Stage(until=1.0, length=2048, rows=2, query_share=0.4, family_rows=0.8),
    ),
    lr=1e-3, decay_from=2.0, watch_lengths=(1024,), watch_samples=4, watch_families=tuple(FAMILIES),
)  # fmt: skip

LONG = Recipe(  # after "families": heads of dimension 128, long texts
    stages=(
        Stage(until=0.4, length=2048, rows=2, query_share=0.4, family_rows=0.75),
        Stage(until=1.0, length=4096, rows=1, query_share=0.25, family_rows=0.75),
    ),
    lr=8e-4, warmup_steps=20, decay_from=0.5, watch_lengths=(1024,), watch_samples=4, watch_families=tuple(FAMILIES),
)  # fmt: skip

TINY = Recipe(
    stages=(Stage(until=0.5, length=96, rows=2, query_share=0.45), Stage(until=1.0, length=128, rows=2, query_share=0.2)),
    layers=1, hidden=64, heads=2, kv_heads=1, intermediate=64, watch_lengths=(128,), watch_samples=1,
)  # fmt: skip


RECIPES = {"needle": Recipe(), "families": FAMILY, "long": LONG}  # in this order, each with --init on the one before


@dataclass
class Progress:
    """What a checkpoint holds besides weights and optimizer."""

    step: int = 0
    seconds: float = 0.0  # spent in training, over all runs
    tokens: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)


def tokenizer_texts() -> Iterator[str]:
    """Training text of the tokenizer: prose, the same capitalised, generated filler, the attributes of facts."""
    sentences = prose.sentences()
    yield from sentences
    yield from (s.title() for s in sentences[::2])
    rng = Random(0)
    yield from (documents.filler_sentence(rng) for _ in range(3000))
    for _ in range(60):
        yield from (f" {a} {a.title()}" for a in documents.ATTRIBUTES)


def build(recipe: Recipe, args: argparse.Namespace) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    if args.init:
        model = AutoModelForCausalLM.from_pretrained(args.init, dtype=torch.float32)
        if args.head_dim and args.head_dim != model.config.head_dim:
            model = network.widened(model, args.head_dim, args.seed)
        return model, PreTrainedTokenizerFast.from_pretrained(args.init)
    tok = tokenizer.train_tokenizer(tokenizer_texts(), training.MAX_POSITION)
    special = {"bos": tok.bos_token_id, "eos": tok.eos_token_id, "pad": tok.pad_token_id}
    config = network.make_config(
        len(tok), recipe.layers, recipe.hidden, recipe.heads, recipe.kv_heads, recipe.intermediate, special
    )
    model = Qwen2ForCausalLM(config).float()
    network.start_weights(model, args.seed)
    return model, tok


def export(model: Qwen2ForCausalLM, tok: PreTrainedTokenizerBase, out: Path) -> None:
    """Writes config, bf16 weights and tokenizer; every file is replaced in one go."""
    staging = out / ".staging"
    staging.mkdir(parents=True, exist_ok=True)
    copy = Qwen2ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.update(do_sample=False, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    copy.save_pretrained(staging)
    tokenizer.save_tokenizer(tok, staging)
    for path in sorted(staging.iterdir()):
        path.chmod(0o644)  # safetensors writes 0600
        os.replace(path, out / path.name)
    staging.rmdir()


CURVE = ("recipe", "step", "tokens", "minutes", "length", "loss", "accuracy", "first_value")  # then free-running scores
EVERY = 5  # steps between two points of the learning curve


def earlier_curve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The learning curve of the weights that training starts from."""
    path = Path(args.init) / "learning_curve.csv" if args.init else None
    if path is None or not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_curve(curve: Sequence[dict[str, Any]], out: Path) -> None:
    """learning_curve.csv of all runs one after the other, and a picture of it if matplotlib is installed."""
    if not curve:
        return
    names = [*CURVE, *dict.fromkeys(key for point in curve for key in point if key not in CURVE)]
    with replacing(out / "learning_curve.csv") as path, open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, restval="")
        writer.writeheader()
        writer.writerows(curve)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    start, scores = 0.0, [name for name in names if name not in CURVE]
    for number, recipe in enumerate(dict.fromkeys(point["recipe"] for point in curve)):
        points = [point for point in curve if point["recipe"] == recipe]
        seen = [start + float(point["tokens"]) / 1e6 for point in points]
        wrong = [max(0.1, 100 * (1 - float(point["accuracy"]))) for point in points]
        axis.plot(seen, wrong, color=f"C{number}", linewidth=1.2, label=f"{recipe}: answer tokens wrong, in training")
        tested = [
            (at, max(0.1, sum(100 - float(point[k]) for k in scores if point.get(k)) / n))
            for at, point in zip(seen, points, strict=True)
            if (n := sum(bool(point.get(k)) for k in scores))
        ]
        if tested:
            axis.plot(
                *zip(*tested, strict=True),
                "o",
                color=f"C{number}",
                markersize=4,
                label=f"{recipe}: 100 - free-running score",
            )
        start = seen[-1]
    axis.set(xlabel="million tokens of training", ylabel="%", yscale="log", title="Learning curve, full cache")
    axis.legend(fontsize=7)
    figure.savefig(out / "learning_curve.png", dpi=110)


def learning_rate(recipe: Recipe, step: int, share: float) -> float:
    decay = 1.0 if share < recipe.decay_from else max(0.02, (1 - share) / (1 - recipe.decay_from))
    return recipe.lr * min(1.0, (step + 1) / recipe.warmup_steps) * decay


def train(args: argparse.Namespace) -> None:
    recipe = TINY if args.tiny else RECIPES[args.recipe]
    out, work = Path(args.out), Path(args.work)
    out.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    model, tok = build(recipe, args)
    model.to(args.device).train()
    rows = training.RowMaker(tok)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)
    forward = torch.compile(network.hidden_states, dynamic=False) if args.compile else network.hidden_states
    progress, before = Progress(), earlier_curve(args)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=args.device, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = Progress(**saved["progress"])
        print(f"resumed at step {progress.step}")

    def save() -> None:
        with replacing(checkpoint) as path:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
            torch.save(state, path)

    def share_done() -> float:
        return progress.step / args.steps if args.steps else progress.seconds / 60 / args.minutes

    def note(stage: Stage) -> dict[str, Any]:
        """A point of the learning curve: running means in training."""
        figures = (args.recipe, progress.step, progress.tokens, round(progress.seconds / 60, 2), stage.length)
        means = (round(mean["loss"], 4), round(mean["accuracy"], 4), round(mean["first"], 4))
        progress.curve.append(dict(zip(CURVE, (*figures, *means), strict=True)))
        return progress.curve[-1]

    def watch(stage: Stage) -> None:
        model.eval()
        point = note(stage)
        for length in recipe.watch_lengths:
            points = measure.pocket_scores(model, tok, length, recipe.watch_samples, seed=1000)
            point[f"needle_{length}"] = round(sum(points) / len(points), 1)
        for family in recipe.watch_families:
            pairs = measure.family_answers(model, tok, family, recipe.watch_lengths[0], recipe.watch_samples, seed=1000)
            point[family] = round(100 * sum(said == sample["answer"] for sample, said in pairs) / len(pairs), 1)
        model.train()
        bar.write(json.dumps(point))
        write_curve([*before, *progress.curve], out)
        if args.publish_over is not None and point[f"needle_{recipe.watch_lengths[0]}"] > args.publish_over:
            export(model, tok, out)

    bar = tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}")
    mean = {"loss": 0.0, "accuracy": 0.0, "first": 0.0}
    last_save = last_watch = time.monotonic()
    cuda = args.device.startswith("cuda")
    while (share := share_done()) < 1.0:
        started = time.monotonic()
        stages = recipe.stages[args.first_stage :]
        floor = recipe.stages[args.first_stage - 1].until if args.first_stage else 0.0
        stage = next(s for s in stages if floor + share * (1 - floor) < s.until)
        ids, weights, positions = (
            torch.from_numpy(a).to(args.device) for a in rows.batch(args.seed, progress.step, stage)
        )
        for group in optimizer.param_groups:
            group["lr"] = args.lr_scale * learning_rate(recipe, progress.step, share)
        with torch.autocast("cuda" if cuda else "cpu", torch.bfloat16):
            loss, accuracy, first = network.answer_loss(model, ids, weights, positions, forward)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        progress.step += 1
        progress.tokens += ids.numel()
        now = {"loss": loss.item(), "accuracy": accuracy.item(), "first": first.item()}
        fresh = progress.step == 1 or not any(mean.values())
        mean = {k: v if fresh else 0.97 * mean[k] + 0.03 * v for k, v in now.items()}
        progress.seconds += time.monotonic() - started
        bar.n = round(100 * min(share_done(), 1.0), 2)
        bar.set_postfix_str(
            f"step {progress.step} L {stage.length} loss {mean['loss']:.3f} acc {mean['accuracy']:.3f} "
            f"first {mean['first']:.3f} {progress.tokens / progress.seconds:.0f} tok/s"
        )
        if progress.step % EVERY == 0:
            note(stage)
        if time.monotonic() - last_save > args.save_every:
            save()
            last_save = time.monotonic()
        if time.monotonic() - last_watch > 60 * args.watch_every:
            watch(stage)
            last_watch = time.monotonic()
    if recipe.watch_lengths and any(mean.values()):  # a finished run started again has nothing new to test
        watch(recipe.stages[-1])
    bar.close()
    save()
    export(model, tok, out)
    write_facts(model, progress, recipe, args)
    card.write_card(out)


def write_facts(model: Qwen2ForCausalLM, progress: Progress, recipe: Recipe, args: argparse.Namespace) -> None:
    """training.json: what the model card says about the training."""
    before = Path(args.init) / "training.json" if args.init else None
    first = json.loads(before.read_text()) if before is not None and before.exists() else None
    summary = ("recipe_name", "minutes", "steps", "tokens", "seed", "device", "recipe", "notes", "head_dim")
    facts: dict[str, Any] = {
        "earlier": [*first.get("earlier", []), {k: first.get(k) for k in summary}] if first else [],
        "recipe_name": "tiny" if args.tiny else args.recipe,
        "head_dim": model.config.head_dim,
        "parameters": sum(p.numel() for p in model.parameters()),
        "minutes": round(progress.seconds / 60, 1),
        "steps": progress.step,
        "tokens": progress.tokens,
        "seed": args.seed,
        "device": f"{torch.get_num_threads()} CPU threads" if args.device == "cpu" else torch.cuda.get_device_name(),
        "init": Path(args.init).name if args.init else None,
        "notes": args.note,
        "recipe": asdict(recipe),
    }
    write_text(Path(args.out) / "training.json", json.dumps(facts, indent=1) + "\n")


def measure_shipped(args: argparse.Namespace) -> None:
    """Measures the weights in --out, writes measured.json and the model card anew."""
    out = Path(args.out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(args.device).eval()
    tok = PreTrainedTokenizerFast.from_pretrained(out)
    path = out / "measured.json"
    measured: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for length in args.lengths:
        n = args.measure
        points = [p for seed in range(3) for p in measure.pocket_scores(model, tok, length, -(-n // 3), seed)][:n]
        whole = 100.0 * sum(p == 100.0 for p in points) / n
        measured.setdefault("needle_pocket", {})[str(length)] = {"n": n, "score": sum(points) / n, "whole": whole}
        if args.families:
            from pqcache.harness.tasks.pocket import score  # needs rouge and rapidfuzz

            for family in FAMILIES:
                pairs = measure.family_answers(model, tok, family, length, n, seed=0)
                cell = {
                    "n": n,
                    "score": sum(100 * score(family, said, sample) for sample, said in pairs) / n,
                    "whole": sum(100 * (said == sample["answer"]) for sample, said in pairs) / n,
                }
                measured.setdefault("pocket", {}).setdefault(str(length), {})[family] = cell
        if args.haystack:
            scores = measure.prose_needle_scores(model, tok, Path(args.haystack), length, 5)
            measured.setdefault("prose_needle", {})[str(length)] = scores
        print(length, {k: v[str(length)] for k, v in measured.items() if str(length) in v}, flush=True)
        path.write_text(json.dumps(measured, indent=1) + "\n")
    draw_measured(measured, out)
    card.write_card(out)


def draw_measured(measured: dict[str, Any], out: Path) -> None:
    """measured.png: the score of each PocketBench family over the prompt's length."""
    if not measured.get("pocket"):
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    lengths = sorted(int(length) for length in measured["pocket"])
    for family in FAMILIES:
        axis.plot(lengths, [measured["pocket"][str(n)][family]["score"] for n in lengths], marker="o", label=family)
    axis.set(xscale="log", xlabel="prompt tokens", ylabel="score", ylim=(0, 102), title="PocketBench, full cache")
    axis.set_xticks(lengths, [str(n) for n in lengths], minor=False)
    axis.set_xticks([], minor=True)
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(out / "measured.png", dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=90.0, help="time for training, over all resumed runs")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps instead of minutes")
    parser.add_argument("--init", default=None, help="folder of weights and tokenizer to continue from")
    parser.add_argument("--head-dim", type=int, default=0, help="widen the heads of --init to this dimension")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="needle")
    parser.add_argument("--first-stage", type=int, default=0, help="index of the stage to start with")
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile; about 1.4 times faster, needs a C++ compiler"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(ROOT / "pqcache" / "embedded" / "weights"))
    parser.add_argument("--work", default=str(ROOT / "results" / "train_embedded"), help="checkpoint folder")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--watch-every", type=float, default=5.0, help="minutes between free-running tests")
    parser.add_argument("--publish-over", type=float, default=None, help="export early once the first test beats this")
    parser.add_argument("--note", action="append", default=[], help="a remark for the model card; may be repeated")
    parser.add_argument(
        "--measure", type=int, default=0, metavar="N", help="no training: N samples per length, new card"
    )
    parser.add_argument(
        "--families", action="store_true", help="for --measure: PocketBench too, N samples of each family"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="for --measure")
    parser.add_argument(
        "--haystack", default=None, help="for --measure: a folder of .txt files for the needle in prose"
    )
    parser.add_argument("--tiny", action="store_true", help="a recipe of seconds, for tests")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.measure:
        measure_shipped(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
