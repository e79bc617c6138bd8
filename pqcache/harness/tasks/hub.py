"""Whether the hub surely cannot be reached: told at once, where its client would try again for half a minute."""

import socket
import time
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 3.0  # seconds until a connection that neither stands nor fails is left to the client
MEMORY = 30.0  # seconds
PORTS = {"http": 80, "https": 443}


class NotAtHand(ValueError):
    """Data of the hub that cannot be had now. A run refuses it; a plan, which downloads nothing, goes on without."""


def unreachable() -> str:
    """Why no request reaches the hub; empty where one may: it answers, or a proxy stands between.

    Empty, too, with HF_HUB_OFFLINE=1, by which nothing is asked for. An answer is kept for up to half a minute: a sweep asks for
    each of its cells.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or set(getproxies()) - {"no"}:
        return ""
    return _tried(constants.ENDPOINT, int(time.monotonic() // MEMORY))


@lru_cache(maxsize=1)
def _tried(endpoint: str, period: int) -> str:
    """Why an address does not answer; empty if it does, or after a wait. period: in which an answer is kept."""
    place = urlsplit(endpoint)
    try:
        socket.create_connection((place.hostname, place.port or PORTS[place.scheme]), timeout=PATIENCE).close()
    except TimeoutError:
        return ""
    except (OSError, ValueError, KeyError) as error:
        return f"{endpoint} cannot be reached ({getattr(error, 'strerror', None) or error})"
    return ""


def without(repo: str, kind: str = "dataset") -> str:
    """Why a repository of the hub surely cannot be had; empty if it may. kind: dataset or model."""
    from huggingface_hub import constants

    if (Path(constants.HF_HUB_CACHE) / "--".join([f"{kind}s", *repo.split("/")])).is_dir():
        return ""
    return f"{why}, and it is not in the hub's cache" if (why := unreachable()) else ""
