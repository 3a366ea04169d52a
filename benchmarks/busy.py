"""What other work on the same cores costs a training: a GRPO step of the default job, alone and beside busy processes.

`python benchmarks/busy.py` has trainers whose threads spin for a short time (as in a run) and as long as libgomp has
them, and one with a single thread, take turns beside 0, 1 and 2 processes that compute all the time: two minutes.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from case import Row, save_model, write_case
from results import FOLDER, Progress, Result, machine, record, versions
from side import Reply, Side, take_turns

_HERE = Path(__file__).parent
_ROW = Row.parse("16x8:40/31")
"""Prompts, completions and lengths of `make run`."""
_KINDS = {
    "short spin": {"GOMP_SPINCOUNT": "1000"},
    "libgomp's own spin": {"GOMP_SPINCOUNT": "300000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
_LOADS = (0, 1, 2)
_WARM_UP = 3


def main() -> None:
    """Measure each kind of trainer beside each number of busy processes; print and record the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each trainer beside each load")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of results")
    options = parser.parse_args()
    on = machine(torch.get_num_threads())
    progress = Progress(len(_KINDS) * (_WARM_UP + len(_LOADS) * options.rounds))
    with tempfile.TemporaryDirectory() as folder:
        seconds = _measure(Path(folder), options.rounds, progress)
    for kind, by_load in seconds.items():
        print(f"{kind:<20}" + "  ".join(f"{load} busy: {value:6.3f} s" for load, value in by_load.items()))
    about = {"versions": versions(Path(sys.executable), "torch"), "settings": {"rounds": options.rounds}}
    path = record(options.out, "busy", on, {"row": str(_ROW), "model": "0.6m"}, {**about, "seconds": seconds})
    print(f"recorded in {path}")


def _measure(folder: Path, rounds: int, progress: Progress) -> dict[str, Result]:
    """Return the median seconds of a step by kind of trainer and number of busy processes."""
    model, _ = save_model(folder / "model", model="0.6m", dtype=torch.float32)
    case = folder / "case.json"
    write_case(
        case,
        _ROW,
        model=folder / "model",
        vocabulary_size=model.vocab_size,
        num_steps=_WARM_UP + len(_LOADS) * rounds,
        device="cpu",
        dtype="float32",
        learning_rate=1e-6,
        kl_coefficient=0.04,
        micro_batch_tokens=4096,
    )

    def ended(kind: str, turn: str, step: Reply) -> None:
        progress.done(f"{kind}, {turn}", step["seconds"])

    with ExitStack() as stack:
        sides = {name: Side(_HERE / "own_step.py", Path(sys.executable), case, kind) for name, kind in _KINDS.items()}
        for side in sides.values():
            stack.callback(side.close)
        take_turns(sides, _WARM_UP, "warm-up", ended)
        seconds: dict[str, Result] = {name: {} for name in sides}
        for load in _LOADS:
            with _busy(load):
                steps, _ = take_turns(sides, rounds, f"{load} busy, round", ended)
            for name, taken in steps.items():
                seconds[name][str(load)] = statistics.median(step["seconds"] for step in taken)
    return seconds


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep `count` processes of one thread computing."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"], env=os.environ) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    main()
