"""`launch=local|ray|slurm`: where the cells of a command run. No part of a cell's identity.

Each engine has a dataclass; its fields are the `launch.*` keys. `make configs` writes them into configs/launch/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import ClassVar

from pqcache.harness.config.values import show


@dataclass(kw_only=True)
class LocalLaunch:
    """This process."""

    name: ClassVar[str] = "local"

    def check(self) -> None:
        """Refuse values that have the right type. Raises a one-line ValueError."""


@dataclass(kw_only=True)
class RayLaunch:
    """Workers of a Ray cluster, or of one that is started on this machine."""

    name: ClassVar[str] = "ray"

    # local (start Ray on this machine) | auto (the cluster that this machine belongs to) | <host>:<port>
    address: str = "local"
    # processes that keep a model each; null: one for each GPU, or one where there is none
    workers: int | None = None
    # of each worker; null: 1 where the cluster has GPUs, else 0
    gpus_per_worker: float | None = None
    # of each worker; its threads are as many
    cpus_per_worker: int = 1
    # how often a unit is run again after its worker was lost
    retries: int = 2

    def check(self) -> None:
        """Refuse values that have the right type. Raises a one-line ValueError."""
        if self.address not in ("local", "auto") and not re.fullmatch(r"(ray://)?[^\s:/]+:\d+", self.address):
            raise ValueError(f"address={self.address}: allowed is local, auto or <host>:<port>")
        _at_least(self, 1, "workers", "cpus_per_worker")
        _at_least(self, 0, "gpus_per_worker", "retries")


@dataclass(kw_only=True)
class SlurmLaunch:
    """Array tasks of SLURM, one worker each."""

    name: ClassVar[str] = "slurm"

    # array tasks that run at once
    workers: int = 1
    # null: the cluster's default
    partition: str | None = None
    # null: the user's default
    account: str | None = None
    # null: the user's default
    qos: str | None = None
    # minutes that a task may run
    time: int = 240
    # of each worker
    gpus_per_worker: int = 0
    # of each worker; its threads are as many
    cpus_per_worker: int = 1
    # memory of each worker, as SLURM writes it (64G); null: the cluster's default
    mem: str | None = None
    # shell lines to run before a worker starts
    setup: list[str] = field(default_factory=list)
    # false: submit and end; the same command later collects what is there
    wait: bool = True
    # how often a unit is run again after its worker was lost
    retries: int = 2

    def check(self) -> None:
        """Refuse values that have the right type. Raises a one-line ValueError."""
        _at_least(self, 1, "workers", "time", "cpus_per_worker")
        _at_least(self, 0, "gpus_per_worker", "retries")
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem):
            raise ValueError(f"mem={self.mem}: allowed is a number with K, M, G or T, or null")


Launch = LocalLaunch | RayLaunch | SlurmLaunch
LAUNCHES: dict[str, type[Launch]] = {cls.name: cls for cls in (LocalLaunch, RayLaunch, SlurmLaunch)}


def _at_least(launch: Launch, least: int, *keys: str) -> None:
    for f in fields(launch):
        value = getattr(launch, f.name)
        if f.name in keys and value is not None and value < least:
            raise ValueError(f"{f.name}={show(value)}: must be at least {least}")
