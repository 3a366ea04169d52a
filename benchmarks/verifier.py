"""How fast answers are graded, and how well: this project's Verifier, math-verify, and TRL's accuracy_reward.

`python benchmarks/verifier.py` has all of them grade the same responses (verifier_cases.py), each in a process of its
own (verifier_side.py), one after the other.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments import python_of
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

Result = dict[str, Any]


def main() -> None:
    """Measure all graders, print what they took, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, help="responses of each kind")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="runs of each grader; the fastest counts")
    parser.add_argument("--out", type=Path, default=_HERE / "results" / "verifier.json")
    options = parser.parse_args()
    cases = batches(options.size)
    runs: dict[str, list[Result]] = {name: [] for name in _NAMES}
    for _ in range(options.rounds):
        for name, taken in runs.items():
            taken.append(_run(name, cases))
    rows = [_row(batch, cases[batch], runs) for batch in cases]
    for row in rows:
        print("\n".join(_lines(row)))
    machine = {"processor": _processor(), "cores": len(os.sched_getaffinity(0))}
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _run(name: str, cases: Mapping[str, list[Case]]) -> Result:
    """What one grader took for all batches, and its verdicts."""
    python = Path(sys.executable) if name.startswith("own") else python_of("trl")
    with tempfile.TemporaryDirectory() as folder:
        given, results = Path(folder) / "cases.json", Path(folder) / "results.json"
        given.write_text(json.dumps(cases), encoding="utf-8")
        subprocess.run([python, _HERE / "verifier_side.py", name, given, results], check=True)
        measured: Result = json.loads(results.read_text(encoding="utf-8"))
    return measured


def _row(batch: str, cases: list[Case], runs: Mapping[str, list[Result]]) -> Result:
    sides = {name: _figures(cases, [run[batch] for run in taken]) for name, taken in runs.items()}
    ratios = {
        f"own_to_{name}_verdicts_per_s": sides["own"]["verdicts_per_s"] / side["verdicts_per_s"]
        for name, side in sides.items()
        if name != "own"
    }
    return {"batch": batch, "responses": len(cases), **sides, "ratios": ratios}


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


def _lines(row: Result) -> list[str]:
    lines = [f"{row['batch']}: {row['responses']} responses"]
    for name, called in _NAMES.items():
        side = row[name]
        lines.append(
            f"  {called:<20}{side['verdicts_per_s']:8.0f} verdicts/s, latency p50 {side['p50_ms']:.2f} ms, "
            f"p99 {side['p99_ms']:.1f} ms, at most {side['max_ms']:.0f} ms; {side['agreement']:.1%} as expected"
        )
    ratios = (
        f"{row['ratios'][f'own_to_{name}_verdicts_per_s']:.1f} x {_NAMES[name]}" for name in ("math_verify", "trl")
    )
    return [*lines, f"  Verifier gives {' and '.join(ratios)}"]


def _processor() -> str:
    models = (line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in line)
    return next(models, platform.machine()).partition(": ")[2]


if __name__ == "__main__":
    main()
