"""What other programs take of the CPUs while this one is timed."""

import time

import psutil

SHORTEST = 0.2  # CPU seconds of the machine; the system counts in hundredths


def _seconds() -> tuple[float, float, int]:
    """(Seconds on the clock; CPU seconds of all other processes, on the CPUs that this one may use; number of these CPUs)."""
    own = psutil.Process()
    allowed = set(own.cpu_affinity()) if hasattr(own, "cpu_affinity") else None  # macOS has none
    used = [t for at, t in enumerate(psutil.cpu_times(percpu=True)) if allowed is None or at in allowed]
    # a guest's seconds are also the user's
    busy = sum(sum(t) - sum(getattr(t, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice")) for t in used)
    return time.perf_counter(), busy - sum(own.cpu_times()[:4]), len(used)


_last = _seconds()


def other_load() -> dict[str, float]:
    """{"other_load": share of the CPUs, 0 to 1, that others used since the last call}; empty if that is too short ago."""
    global _last
    before, (clock, others, cpus) = _last, _seconds()
    whole = (clock - before[0]) * cpus
    if whole < SHORTEST:
        return {}
    _last = clock, others, cpus
    return {"other_load": round(min(1.0, max(0.0, (others - before[1]) / whole)), 3)}
