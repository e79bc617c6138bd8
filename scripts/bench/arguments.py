"""A check of command-line options that benchmarks share."""

import argparse


def refuse_below(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """End the command in one line if an option (a number, a list of numbers or None) is smaller than allowed."""
    for name, minimum in least.items():
        value = getattr(args, name)
        smallest = min(value) if isinstance(value, list) else value
        if smallest is not None and smallest < minimum:
            parser.error(f"--{name.replace('_', '-')}={smallest}: allowed is an int >= {minimum}")
