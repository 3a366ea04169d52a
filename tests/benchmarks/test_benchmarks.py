"""Benchmarks run by hand only: that they can be imported, what they have computed and graded, and what they count."""

import importlib
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.grading.verifier import Submission, Verdict, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.presets import ROOT

BENCHMARKS = ROOT / "benchmarks"
IN_TRL_ENVIRONMENT = {"trl_learning", "trl_losses", "trl_step", "trl_tools"}


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_benchmarked_trainer_takes_its_settings(dtype: str) -> None:
    """Nothing else would notice that a key has gone."""
    case = {"dtype": dtype, "prompts": [["w1", "w2"]], "group_size": 4, "lengths_B": [8] * 8}
    case |= {"learning_rate": 1e-6, "kl_coefficient": 0.04, "micro_batch_tokens": 64}
    config = importlib.import_module("own_step").settings(case)
    assert (config.prompts_per_step, config.loss.kl.coefficient) == (2, 0.04)


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


def test_a_row_of_turns_counts_what_both_trainers_read() -> None:
    """Three turns of 32 tokens; each of the two answers between them has 16 words, an end, and two names of roles."""
    tools = importlib.import_module("tools")
    turns = tools.TurnsRow.parse("4x8:117/3x32+16")
    assert str(turns) == "4x8:117/3x32+16"
    assert turns.length == 3 * 32 + 2 * (16 + 1 + 2)
    with pytest.raises(ValueError, match="4x8:117/64 is no row; PROMPTSxGROUP:PROMPT/TURNSxTOKENS"):
        tools.TurnsRow.parse("4x8:117/64")


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
    cases[3]["label"] = True
    same = {"verdicts": ["right", "wrong", "unscorable", "right"], "start_s": 1.0, "start_cpu_s": 2.0}
    runs = [
        {**same, "batch_s": 4.0, "batch_cpu_s": 0.4, "latencies_s": [0.1, 0.1, 0.1, 0.1]},
        {**same, "batch_s": 2.0, "batch_cpu_s": 0.8, "latencies_s": [0.001, 0.002, 0.003, 0.004]},
    ]
    figures = importlib.import_module("verifier")._figures(cases, runs)
    assert figures["verdicts_per_s"] == 2
    assert figures["p50_ms"] == pytest.approx(2.5)
    assert figures["max_ms"] == pytest.approx(4)
    assert figures["cpu_ms"] == pytest.approx(100)
    assert figures["agreement"] == 0.5
    assert figures["agreement_with_labels"] == 0.75


XEON = {"processor": "Intel(R) Xeon(R) CPU @ 2.20GHz", "threads": 4, "gpu": None}
FIGURES = {
    "limit": {"seconds": 1.0},
    "own": {"seconds": 2.0},
    "ratios": {
        "own_to_limit": 2.0,
        "trl_to_own_seconds": 8.0,
        "trl_tuned_to_own_seconds": 3.0,
        "trl_to_own_memory": 5.0,
    },
}


def step(name: str, *trainers: str) -> dict[str, Any]:
    """What tells a row of a step from others."""
    return {"row": name, "model": "13m", "trainers": list(trainers)}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "intel-xeon-cpu-2-20ghz-4-threads"),
        ({"processor": "AMD EPYC", "threads": 2}, "amd-epyc-2-threads"),
        ({"gpu": "NVIDIA H200"}, "nvidia-h200-4-threads"),
    ],
)
def test_a_machines_file_is_named_after_what_computes(changes: dict[str, Any], name: str) -> None:
    """Trade marks, blanks and signs are left out."""
    assert importlib.import_module("results").slug(XEON | changes) == name


def test_a_row_replaces_only_its_predecessor(tmp_path: Path) -> None:
    """Rows that were not measured again stay as they are and where they are, also those of fewer trainers."""
    record = importlib.import_module("results").record
    for identity, seconds in (
        (step("a", "trl", "own"), 1),
        (step("b", "trl", "own"), 2),
        (step("a", "own"), 3),
        (step("a", "trl", "own"), 4),
    ):
        path = record(tmp_path, "grpo_step", XEON, identity, {"own": {"seconds": seconds}})
    record(tmp_path, "grpo_step", XEON | {"threads": 2}, step("b", "trl", "own"), {"own": {"seconds": 5}})
    written = json.loads(path.read_text())
    assert written["machine"] == XEON
    assert [(row["row"], row["trainers"], row["own"]["seconds"]) for row in written["rows"]] == [
        ("a", ["trl", "own"], 4),
        ("b", ["trl", "own"], 2),
        ("a", ["own"], 3),
    ]


def test_the_table_has_the_rows_of_all_machines(tmp_path: Path) -> None:
    """Ratios of trainers that were not measured are empty."""
    results = importlib.import_module("results")
    results.record(tmp_path, "grpo_step", XEON, step("a", "trl", "trl_tuned", "own"), FIGURES)
    alone = FIGURES | {"ratios": {"own_to_limit": 2.0}}
    results.record(tmp_path, "grpo_step", XEON | {"gpu": "NVIDIA H200"}, step("b", "own"), alone)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in results.table(tmp_path).splitlines()]
    head, _, first, second = lines
    assert [first[0], first[1], *first[4:]] == [
        "intel-xeon-cpu-2-20ghz-4-threads",
        "a",
        *("2.00", "1.00", "2.00", "8.00", "3.00", "5.00"),
    ]
    assert [second[0], *second[4:]] == ["nvidia-h200-4-threads", "2.00", "1.00", "2.00", "", "", ""]
    assert len(head) == len(first)


def test_the_table_can_be_made_of_the_recorded_results() -> None:
    """Files of results have what the table asks of them, and every row of theirs is whole."""
    results = importlib.import_module("results")
    lines = [line.split(" | ") for line in results.table(results.FOLDER).splitlines()]
    assert len(lines) > 2
    assert all(len(line) == len(lines[0]) for line in lines)


def test_progress_tells_what_ended_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is taken to go on as before; the last line has nothing left."""
    results = importlib.import_module("results")
    times = iter([100.0, 110.0, 190.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: next(times)))
    progress = results.Progress(2)
    progress.done("a row, round 1 of 2", 2.5)
    progress.done("a row, round 2 of 2", 70)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1/2  a row, round 1 of 2: 2.5 s; about 00:10 left"
    assert second == "2/2  a row, round 2 of 2: 70 s"


def test_every_step_is_told_as_it_ends() -> None:
    """Each trainer's steps are counted from one, in the order in which they are taken."""
    take_turns = importlib.import_module("side").take_turns
    told: list[Any] = []

    def side(name: str) -> Any:
        return SimpleNamespace(cpu_s=lambda: 0.0, step=lambda: {"seconds": name, "before": len(told)})

    taken, _ = take_turns({"trl": side("t"), "own": side("o")}, 2, "round", lambda *step: told.append(step))
    assert [(name, turn) for name, turn, _ in told] == [
        ("trl", "round 1 of 2"),
        ("own", "round 1 of 2"),
        ("trl", "round 2 of 2"),
        ("own", "round 2 of 2"),
    ]
    assert [step["before"] for *_, step in told] == [0, 1, 2, 3]
    assert taken["own"] == [step for name, _, step in told if name == "own"]
