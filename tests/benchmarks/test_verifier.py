"""What the benchmark of the grader counts and has graded."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules are found beside its script, not in a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("verifier")


def test_all_graders_are_given_the_same_cases(benchmark: Any) -> None:
    """The cases are the same every time, some right and some wrong, and one in a hundred hangs."""
    batches = benchmark.batches(200)
    assert batches == benchmark.batches(200)
    for cases in batches.values():
        assert {case["right"] for case in cases} == {True, False}
    plain, hanging = batches["GSM8K-like"], batches["1 % hang"]
    assert [n for n in range(200) if plain[n] != hanging[n]] == [50, 150]


@pytest.mark.slow
def test_the_expected_verdicts_are_true(benchmark: Any) -> None:
    """The cases are right and wrong as they say."""
    batches = benchmark.batches(60)
    with Verifier() as verify:
        for name in ("GSM8K-like", "MATH-like"):
            submissions = [Submission(case["gold"], case["response"], AnswerPolicy.STATED) for case in batches[name]]
            verdicts = [grade.verdict for grade in verify(submissions)]
            assert verdicts == [Verdict.RIGHT if case["right"] else Verdict.WRONG for case in batches[name]]


def test_the_fastest_run_counts(benchmark: Any) -> None:
    """Rates are of the fastest run, percentiles of single calls; a verdict agrees if right ones are right."""
    cases = [{"gold": "1", "response": "", "right": right} for right in (True, True, False, False)]
    verdicts = ["right", "wrong", "unscorable", "right"]
    runs = [
        {"verdicts": verdicts, "batch_s": 4.0, "latencies_s": [0.1, 0.1, 0.1, 0.1]},
        {"verdicts": verdicts, "batch_s": 2.0, "latencies_s": [0.001, 0.002, 0.003, 0.004]},
    ]
    figures = benchmark._figures(cases, runs)
    assert figures["verdicts_per_s"] == 2
    assert figures["p50_ms"] == pytest.approx(2.5)
    assert figures["max_ms"] == pytest.approx(4)
    assert figures["agreement"] == 0.5
