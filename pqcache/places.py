"""Where the project's own files are: beside the package in a clone, inside it where it was installed.

in a clone             in an installation        what it is
configs/               pqcache/_configs/         the configuration files of the command
results/published/     pqcache/_published/       the papers' tables
results/reference/     pqcache/_reference/       the rows that this project measured
baselines/             pqcache/_baselines/       the methods other than PQCache

setup.py puts them there, so that an installation adds one name to an environment: pqcache. `baselines.full` in this project's
texts is `pqcache._baselines.full` there; `module_name` says which.
"""

import importlib.util
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent  # of a clone, or the folder of installed packages
INSTALLED = (PACKAGE / "_configs").is_dir()

CONFIGS = PACKAGE / "_configs" if INSTALLED else ROOT / "configs"
PUBLISHED = PACKAGE / "_published" if INSTALLED else ROOT / "results" / "published"
REFERENCE = PACKAGE / "_reference" if INSTALLED else ROOT / "results" / "reference"
BASELINES = PACKAGE / "_baselines" if INSTALLED else ROOT / "baselines"
COMMAND = "pqcache" if INSTALLED else "python run.py"  # what a user types


def module_name(name: str) -> str:
    """The name under which a module of this project is imported here."""
    first, dot, rest = name.partition(".")
    if first != "baselines":
        return name
    if INSTALLED:
        return f"{PACKAGE.name}._baselines{dot}{rest}"
    _import_from_the_clone()
    return name


@cache
def _import_from_the_clone() -> None:
    """Let `import baselines` find the clone's folder, wherever the command was started."""
    spec = importlib.util.find_spec("baselines")
    if spec is None or str(BASELINES) not in map(str, spec.submodule_search_locations or ()):
        sys.path.insert(0, str(ROOT))


def file_of(name: str) -> Path | None:
    """The source of a module of this project by its name in a clone, or None. Nothing is imported."""
    first, *rest = name.split(".")
    folder = {PACKAGE.name: PACKAGE, "baselines": BASELINES}.get(first)
    if folder is None:
        return None
    path = folder.joinpath(*rest)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)
