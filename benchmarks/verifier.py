"""How fast answers are graded, and how well: this project's Verifier, math-verify, and TRL's accuracy_reward.

`python benchmarks/verifier.py` has all of them grade the same responses (verifier_cases.py), each in a process of its
own (verifier_side.py), one after the other.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from environments import python_of
from results import FOLDER, Progress, Result, machine, record, versions
from verifier_cases import Case, batches

_HERE = Path(__file__).parent
_NAMES = {
    "math_verify": "math-verify",
    "trl": "TRL accuracy_reward",
    "own_1": "Verifier, 1 worker",
    "own": "Verifier",
}
_ROUNDS = 2
"""Runs of each grader; the fastest counts, as other work on the machine can only slow one down."""


def main() -> None:
    """Measure all graders on the sets asked for, print each set, and record it as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(batches(1))
    parser.add_argument("sets", nargs="*", help=f"of responses: {names}; all by default".replace("%", "%%"))
    parser.add_argument("--size", type=int, default=1000, help="responses of each kind")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="runs of each grader; the fastest counts")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of results")
    options = parser.parse_args()
    sets = batches(options.size)
    if unknown := set(options.sets) - set(sets):
        parser.error(f"no such set: {', '.join(sorted(unknown))}; there are {names}")
    pythons = {name: Path(sys.executable) if name.startswith("own") else python_of("trl") for name in _NAMES}
    on = machine(len(os.sched_getaffinity(0)))
    about = {"versions": versions(pythons["trl"], "trl", "math-verify"), "settings": {"rounds": options.rounds}}
    chosen = options.sets or list(sets)
    progress = Progress(len(chosen) * options.rounds * len(_NAMES))
    for name in chosen:
        figures = _measure(name, sets[name], pythons, progress, rounds=options.rounds)
        print("\n".join(_lines(name, len(sets[name]), figures)))
        identity = {"row": name, "responses": len(sets[name])}
        print(f"recorded in {record(options.out, 'verifier', on, identity, {**about, **figures})}", flush=True)


def _measure(name: str, cases: list[Case], pythons: Mapping[str, Path], progress: Progress, *, rounds: int) -> Result:
    """What all graders took for a set of responses, and the ratios of their rates."""
    runs: dict[str, list[Result]] = {grader: [] for grader in pythons}
    for number in range(1, rounds + 1):
        for grader, taken in runs.items():
            started = time.monotonic()
            taken.append(_run(grader, pythons[grader], cases))
            progress.done(f"{name}, {_NAMES[grader]}, round {number} of {rounds}", time.monotonic() - started)
    sides = {grader: _figures(cases, taken) for grader, taken in runs.items()}
    ratios = {
        f"own_to_{grader}_verdicts_per_s": sides["own"]["verdicts_per_s"] / side["verdicts_per_s"]
        for grader, side in sides.items()
        if grader != "own"
    }
    return {**sides, "ratios": ratios}


def _run(grader: str, python: Path, cases: list[Case]) -> Result:
    """What one grader took, and its verdicts."""
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "cases.json", Path(folder) / "results.json"
        given.write_text(json.dumps(cases), encoding="utf-8")
        subprocess.run([python, _HERE / "verifier_side.py", grader, given, results], check=True)
        measured: Result = json.loads(results.read_text(encoding="utf-8"))
    return measured


def _figures(cases: list[Case], runs: list[Result]) -> Result:
    fastest = min(runs, key=lambda run: run["batch_s"])
    latencies_ms = min(([1000 * latency for latency in run["latencies_s"]] for run in runs), key=sum)
    percentiles = statistics.quantiles(latencies_ms, n=100, method="inclusive")
    agree = [(verdict == "right") == case["right"] for verdict, case in zip(fastest["verdicts"], cases, strict=True)]
    return {
        "verdicts_per_s": len(cases) / fastest["batch_s"],
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
        "max_ms": max(latencies_ms),
        "agreement": statistics.fmean(agree),
    }


def _lines(name: str, num_responses: int, row: Result) -> list[str]:
    lines = [f"{name}: {num_responses} responses"]
    for grader, called in _NAMES.items():
        side = row[grader]
        lines.append(
            f"  {called:<20}{side['verdicts_per_s']:8.0f} verdicts/s, latency p50 {side['p50_ms']:.2f} ms, "
            f"p99 {side['p99_ms']:.1f} ms, at most {side['max_ms']:.0f} ms; {side['agreement']:.1%} as expected"
        )
    ratios = (
        f"{row['ratios'][f'own_to_{grader}_verdicts_per_s']:.1f} x {_NAMES[grader]}"
        for grader in ("math_verify", "trl")
    )
    return [*lines, f"  Verifier gives {' and '.join(ratios)}"]


if __name__ == "__main__":
    main()
