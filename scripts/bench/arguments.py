"""Command-line options that benchmarks share."""

import argparse
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")


def add_machine_options(
    parser: argparse.ArgumentParser, device: str = "cpu", threads: int | None = None, json: bool = True
) -> None:
    """--device, --dtype, --threads, and --json where figures are written."""
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=threads, help="of the CPU; default what torch chooses")
    if json:
        parser.add_argument("--json", type=Path, default=None, help="write the figures here")


def refuse_below(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """End the command in one line if an option (a number, a list of numbers or None) is smaller than allowed."""
    for name, minimum in least.items():
        value = getattr(args, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest is not None and smallest < minimum:
            parser.error(f"--{name.replace('_', '-')}={smallest}: allowed is an int >= {minimum}")


def prepare(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Set the threads; the device and dtype of --device and --dtype."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return torch.device(args.device), getattr(torch, args.dtype)
