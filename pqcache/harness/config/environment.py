"""Where a result came from (versions, commit, machine), and where other packages write their files."""

import hashlib
import logging
import os
import platform
import subprocess
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from pqcache import __version__, places

PACKAGES = ("torch", "transformers", "lm_eval", "datasets", "tokenizers", "numpy", "hydra-core")


def versions() -> dict[str, str | None]:
    """Package -> version, python and this package included."""
    own = {"python": platform.python_version(), "pqcache": __version__}
    return {**own, **{package: metadata.version(package) for package in PACKAGES}}


class Facts(TypedDict):
    """Where a sample was measured."""

    device: str  # caption of the machine
    git_commit: str | None  # with -dirty.<hash of the changes> where tracked files had some
    versions: dict[str, str | None]


@cache
def facts(device: str, kept: str = "") -> Facts:
    """Read once per device. kept: where the model's weights are, in words, if they are not all on the device."""
    from pqcache.measure.machine import device_caption  # imports torch

    caption = device_caption(device) + (f", {kept}" if kept else "")
    return {"device": caption, "git_commit": git_commit(), "versions": versions()}


@cache
def git_commit() -> str | None:
    """The commit of this source tree, when first asked for: later changes are not what runs. None outside a repository.

    It ends with -dirty.<8 hex digits of `git diff HEAD`> if tracked files were changed. None, too, where git does not say it.
    """
    root = places.ROOT
    if places.INSTALLED or not (root / ".git").exists():  # installed inside another project's repository
        return None
    ask = partial(subprocess.run, cwd=root, capture_output=True, text=True, timeout=20, check=True)
    try:
        commit, changes = (ask(["git", word, "HEAD"]).stdout.strip() for word in ("rev-parse", "diff"))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty.{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else commit


def keep_files_under(out: Path, cache_dir: Path) -> None:
    """Send what datasets and evaluate write to a folder under `out`, matplotlib's font list to `cache_dir`.

    The hub cache stays where it is.
    """
    cache = (out / ".cache").resolve()
    keep_fonts_under(cache_dir)
    import datasets

    settings: Any = datasets.config
    settings.HF_DATASETS_CACHE = cache / "datasets"
    settings.DOWNLOADED_DATASETS_PATH = cache / "datasets" / "downloads"
    settings.EXTRACTED_DATASETS_PATH = cache / "datasets" / "downloads" / "extracted"
    settings.HF_MODULES_CACHE = cache / "modules"
    datasets.disable_progress_bars()


def keep_fonts_under(cache_dir: Path) -> None:
    """Send matplotlib's font list to `cache_dir`."""
    # matplotlib reads this variable when it is first imported and offers no other way
    os.environ.setdefault("MPLCONFIGDIR", str((cache_dir / "matplotlib").resolve()))


def quiet() -> None:
    """Silence transformers' progress bars, and messages of lm-eval, accelerate and the hub below ERROR: we say it in a line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for name in ("lm_eval", "accelerate", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
