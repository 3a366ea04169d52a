"""Benchmarks run by hand only: that they can be imported, what they have computed and graded, and what they count."""

import importlib
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.presets import ROOT

BENCHMARKS = ROOT / "benchmarks"
IN_TRL_ENVIRONMENT = {"trl_step"}


@pytest.fixture(autouse=True)
def _beside_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks' modules are found beside their scripts, not in a package."""
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.slow
def test_benchmarks_can_be_imported() -> None:
    """Nothing else would notice that what they import has moved."""
    names = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - IN_TRL_ENVIRONMENT)
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    environment = {"PYTHONPATH": f"{BENCHMARKS}:{ROOT}"}
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def row(text: str) -> Any:
    """A row of the benchmark of a step: prompts, completions and their lengths."""
    return importlib.import_module("case").Row.parse(text)


def test_operations_are_those_counted_by_hand() -> None:
    """Two prompts of 3 tokens, four completions of 4, 26 parameters with 7 x 3 of the head, two layers of width 3."""
    limit = importlib.import_module("limit")
    config = SimpleNamespace(num_hidden_layers=2, hidden_size=3, vocab_size=7)
    # 22 tokens at 2 x 5 each, 16 of them at 2 x 21 more.
    # Prompt tokens see 1, 2, 3 keys, those of a completion 4, 5, 6, 7: 2 x 6 + 4 x 22 = 100.
    by_hand = 22 * 2 * 5 + 16 * 2 * 21 + 100 * 4 * 2 * 3
    forward = limit.forward_flops(config, row("2x2:3/4"), num_parameters=26)
    assert forward == by_hand
    assert limit.update_operations(forward) == 4 * by_hand
    assert limit.step_operations(forward) == 5 * by_hand


def test_a_range_spreads_lengths_evenly_in_a_fixed_order() -> None:
    """Every step between neighbouring lengths is the same but for rounding, and both ends are there."""
    lengths = row("4x8:117/16-256").lengths_B()
    ordered = sorted(lengths)
    steps = [after - before for before, after in pairwise(ordered)]
    assert (len(lengths), ordered[0], ordered[-1]) == (32, 16, 256)
    assert max(steps) - min(steps) <= 1
    assert ordered != lengths == row("4x8:117/16-256").lengths_B()


@pytest.mark.parametrize("text", ["4x8:117/64", "2x16:464/16-64"])
def test_rows_are_named_as_they_are_written(text: str) -> None:
    """What a person asks for is what the results call it."""
    assert str(row(text)) == text


@pytest.mark.parametrize("text", ["4x8", "4x8:117", "4x8:117/64-", "x:1/1", "4x8:117/64 "])
def test_other_texts_are_no_rows(text: str) -> None:
    """The message shows what is expected."""
    with pytest.raises(ValueError, match="4x8:117/64"):
        row(text)


def test_all_graders_are_given_the_same_cases() -> None:
    """The cases are the same every time, some right and some wrong, and one in a hundred hangs."""
    benchmark = importlib.import_module("verifier")
    batches = benchmark.batches(200)
    assert batches == benchmark.batches(200)
    for cases in batches.values():
        assert {case["right"] for case in cases} == {True, False}
    plain, hanging = batches["GSM8K-like"], batches["1 % hang"]
    assert [n for n in range(200) if plain[n] != hanging[n]] == [50, 150]


@pytest.mark.slow
def test_the_expected_verdicts_are_true() -> None:
    """The cases are right and wrong as they say."""
    batches = importlib.import_module("verifier").batches(60)
    with Verifier() as verify:
        for name in ("GSM8K-like", "MATH-like"):
            submissions = [Submission(case["gold"], case["response"], AnswerPolicy.STATED) for case in batches[name]]
            verdicts = [grade.verdict for grade in verify(submissions)]
            assert verdicts == [Verdict.RIGHT if case["right"] else Verdict.WRONG for case in batches[name]]


def test_the_fastest_run_counts() -> None:
    """Rates are of the fastest run, percentiles of single calls; a verdict agrees if right ones are right."""
    cases = [{"gold": "1", "response": "", "right": right} for right in (True, True, False, False)]
    verdicts = ["right", "wrong", "unscorable", "right"]
    runs = [
        {"verdicts": verdicts, "batch_s": 4.0, "latencies_s": [0.1, 0.1, 0.1, 0.1]},
        {"verdicts": verdicts, "batch_s": 2.0, "latencies_s": [0.001, 0.002, 0.003, 0.004]},
    ]
    figures = importlib.import_module("verifier")._figures(cases, runs)
    assert figures["verdicts_per_s"] == 2
    assert figures["p50_ms"] == pytest.approx(2.5)
    assert figures["max_ms"] == pytest.approx(4)
    assert figures["agreement"] == 0.5
