"""Train the small models shipped in `pqcache/embedded`, from nothing but this repository and Python.

    python scripts/embedded/train.py --minutes 90                       # all stages, two CPU cores are enough
    python scripts/embedded/train.py --minutes 90 --work /tmp/train     # the same command again resumes after a kill
    python scripts/embedded/train.py --init pqcache/embedded/weights --minutes 30 --first-stage 3   # train on
    python scripts/embedded/train.py --recipe families --init <needle's out> --minutes 60 --out <folder>
    python scripts/embedded/train.py --recipe long --init <families' out> --head-dim 128 --minutes 60
    python scripts/embedded/train.py --recipe chain --minutes 45 --out pqcache/embedded/chain_weights
    python scripts/embedded/train.py --device cuda --minutes 20

Needs torch and transformers. The last checkpoint is in `--work`; weights, tokenizer, learning curve and training.json go to
`--out`. A run of the harness measures them: `python run.py model=hf model.path=<out> method=full task=needle_pocket`.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pqcache.atomic import replacing, write_text
from pqcache.embedded import model_dir
from scripts.embedded import network
from scripts.embedded.chain_rows import ChainRows
from scripts.embedded.recipes import RECIPES, TINY, Recipe, Stage
from scripts.embedded.training_rows import RowMaker
from scripts.embedded.weights import export, start

WORK = Path(__file__).resolve().parents[2] / "results" / "train_embedded"
# Steps between two points of the learning curve.
CURVE_STEPS = 5


@dataclass
class Progress:
    """What a checkpoint holds besides weights and optimizer. seconds: spent in training, over all runs."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """One run: the model, its optimizer and how far it has come."""

    def __init__(self, recipe: Recipe, args: argparse.Namespace) -> None:
        self.recipe, self.args = recipe, args
        self.out, self.checkpoint = Path(args.out), Path(args.work) / "checkpoint.pt"
        self.out.mkdir(parents=True, exist_ok=True)
        self.model, self.tokenizer = start(recipe, args.init, args.head_dim, args.seed)
        self.model.to(args.device).train()
        self.rows = ChainRows(self.tokenizer) if recipe.rows == "chain" else RowMaker(self.tokenizer)
        self.optimizer = make_optimizer(self.model, recipe)
        self.forward = torch.compile(network.hidden_states, dynamic=False) if args.compile else network.hidden_states
        self.progress = Progress()
        earlier = Path(args.init or "") / "learning_curve.csv"
        self.earlier = list(csv.DictReader(earlier.read_text().splitlines())) if args.init and earlier.exists() else []
        # Running means of loss, accuracy and accuracy of first value tokens; empty before the first step.
        self.means: dict[str, float] = {}
        if self.checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        """Go on from the checkpoint."""
        saved = torch.load(self.checkpoint, map_location=self.args.device, weights_only=False)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.progress = Progress(**saved["progress"])
        print(f"resumed at step {self.progress.step}")

    def save(self) -> None:
        """Write the checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with replacing(self.checkpoint) as path:
            torch.save({**state, "progress": asdict(self.progress)}, path)

    @property
    def share(self) -> float:
        """How much of the planned training is done."""
        if self.args.steps:
            return self.progress.step / self.args.steps
        return self.progress.seconds / 60 / self.args.minutes

    def step(self) -> Stage:
        """One optimizer step; the stage it belonged to."""
        started = time.monotonic()
        progress, share = self.progress, self.share
        stage = self.recipe.stage(share, self.args.first_stage)
        batch = self.rows.batch(self.args.seed, progress.step, stage)
        ids, weights, positions = (torch.from_numpy(array).to(self.args.device) for array in batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr_scale * self.recipe.learning_rate(progress.step, share)
        with torch.autocast(torch.device(self.args.device).type, torch.bfloat16):
            loss, accuracy, first = network.answer_loss(self.model, ids, weights, positions, self.forward)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        progress.step += 1
        progress.tokens += ids.numel()
        values = {"loss": loss.item(), "accuracy": accuracy.item(), "first_value": first.item()}
        self.means = {k: 0.97 * self.means[k] + 0.03 * v if self.means else v for k, v in values.items()}
        progress.seconds += time.monotonic() - started
        if progress.step % CURVE_STEPS == 0:
            point = {"recipe": self.args.recipe, "step": progress.step, "tokens": progress.tokens}
            point |= {"minutes": round(progress.seconds / 60, 2), "length": stage.length}
            progress.curve.append(point | {name: round(mean, 4) for name, mean in self.means.items()})
        return stage

    def finish(self) -> None:
        """Checkpoint, weights, learning curve and facts."""
        self.save()
        export(self.model, self.tokenizer, self.out, own_tokenizer=self.recipe.rows != "chain")
        points = [*self.earlier, *self.progress.curve]
        with replacing(self.out / "learning_curve.csv") as path, open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(key for point in points for key in point)))
            writer.writeheader()
            writer.writerows(points)
        self.write_facts()

    def write_facts(self) -> None:
        """training.json: how the weights were trained."""
        args, progress = self.args, self.progress
        before = Path(args.init) / "training.json" if args.init else None
        first = json.loads(before.read_text()) if before is not None and before.exists() else None
        summary = ("recipe_name", "minutes", "steps", "tokens", "seed", "device", "recipe", "notes", "head_dim")
        cpu = f"{torch.get_num_threads()} CPU threads"
        facts: dict[str, Any] = {
            "earlier": [*first.get("earlier", []), {k: first.get(k) for k in summary}] if first else [],
            "recipe_name": "tiny" if args.tiny else args.recipe,
            "head_dim": self.model.config.head_dim,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "minutes": round(progress.seconds / 60, 1),
            "steps": progress.step,
            "tokens": progress.tokens,
            "seed": args.seed,
            "device": cpu if args.device == "cpu" else torch.cuda.get_device_name(),
            "init": Path(args.init).name if args.init else None,
            "notes": args.note,
            "recipe": asdict(self.recipe),
        }
        write_text(self.out / "training.json", json.dumps(facts, indent=1) + "\n")


def make_optimizer(model: Qwen2ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas)


def train(args: argparse.Namespace) -> None:
    """Train until the planned minutes or steps are done, with checkpoints on the way."""
    run = Training(TINY if args.tiny else RECIPES[args.recipe], args)
    last_save = time.monotonic()
    with tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}<{remaining} {postfix}") as bar:
        while run.share < 1.0:
            stage = run.step()
            bar.n = round(100 * min(run.share, 1.0), 2)
            means = " ".join(f"{name} {mean:.3f}" for name, mean in run.means.items())
            rate = run.progress.tokens / run.progress.seconds
            bar.set_postfix_str(f"step {run.progress.step} L {stage.length} {means} {rate:.0f} tok/s")
            if time.monotonic() - last_save > args.save_every:
                run.save()
                last_save = time.monotonic()
    run.finish()


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
    faster = "torch.compile; about 1.4 times faster, needs a C++ compiler"
    parser.add_argument("--compile", action="store_true", help=faster)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(model_dir()))
    parser.add_argument("--work", default=str(WORK), help="checkpoint folder")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    parser.add_argument("--note", action="append", default=[], help="a remark for training.json; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="a recipe of seconds, for tests")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
