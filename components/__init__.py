"""The stages of the pipeline, and what they share."""

import os
import time
from contextlib import suppress
from pathlib import Path

_SPIN, _SHORT_SPIN = 300_000, 1_000
"""libgomp's own (some 3 ms), and one that costs 4 to 10 % on idle cores but little beside other work."""


def _spin_count() -> int:
    """Return how long threads of OpenMP spin while they wait for one another; briefly if other work runs here.

    A thread whose core is taken has all others spin for it in each of thousands of parallel loops a second, and a step
    takes 2 to 20 times as long (benchmarks/busy.py).
    """
    running = []
    for _ in range(3):  # another process may run for a moment
        time.sleep(0.003)
        running.append(int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]))
    return _SHORT_SPIN if min(running) > 1 else _SPIN


# libgomp reads this when torch loads it, so it has to be here. Whoever starts a run decides for all its processes.
if os.environ.keys().isdisjoint(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
    with suppress(OSError):  # there is no such file but on Linux
        os.environ["GOMP_SPINCOUNT"] = str(_spin_count())
