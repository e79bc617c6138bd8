"""The folder of packages that lm-eval's mathematics tasks need and that cannot stand in Hydra's environment.

python -m pqcache.harness.tasks.math_process.packages        # `make math`: installs them there
"""

import os
import subprocess
import sys
from pathlib import Path

from pqcache import places

VARIABLE = "PQCACHE_MATH"  # names another folder
DEFAULT = "~/.cache/pqcache/math"
# what lm-eval's extra `math` asks for, with what these need; a test compares the scores of these versions with lm-eval's
REQUIREMENTS = (
    "antlr4-python3-runtime==4.11.0",
    "latex2sympy2-extended==1.11.0",
    "math-verify==0.9.0",
    "mpmath==1.3.0",
    "sympy==1.14.0",
)


def folder() -> Path:
    """Where the packages are, or would be."""
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser().absolute()


def command() -> str:
    """What a user types to install them."""
    return f"python -m {__package__}.packages" if places.INSTALLED else "make math"


def main() -> int:
    """Install them by pip, and return its exit code."""
    # without dependencies: pip would compare them with this environment, and warn of Hydra
    options = ["install", "--quiet", "--upgrade", "--no-deps", "--target", str(folder())]
    return subprocess.run([sys.executable, "-m", "pip", *options, *REQUIREMENTS]).returncode


if __name__ == "__main__":
    sys.exit(main())
