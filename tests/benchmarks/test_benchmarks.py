"""Benchmarks run by hand only: that they can be imported, what they have computed, and what they count."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

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
def test_the_benchmarked_trainer_takes_its_settings() -> None:
    """Nothing else would notice that a key has gone."""
    case = {"dtype": "bfloat16", "prompts": [["w1", "w2"]], "group_size": 4, "lengths_B": [8] * 8}
    case |= {"learning_rate": 1e-6, "kl_coefficient": 0.04, "micro_batch_tokens": 64}
    config = importlib.import_module("own_step").settings(case)
    assert (config.prompts_per_step, config.loss.kl.coefficient) == (2, 0.04)


def test_operations_are_those_counted_by_hand() -> None:
    """Two prompts of 3 tokens, four completions of 4, 26 parameters with 7 x 3 of the head, two layers of width 3."""
    limit = importlib.import_module("limit")
    config = SimpleNamespace(num_hidden_layers=2, hidden_size=3, vocab_size=7)
    # 22 tokens at 2 x 5 each, 16 of them at 2 x 21 more.
    # Prompt tokens see 1, 2, 3 keys, those of a completion 4, 5, 6, 7: 2 x 6 + 4 x 22 = 100.
    by_hand = 22 * 2 * 5 + 16 * 2 * 21 + 100 * 4 * 2 * 3
    forward = limit.forward_flops(config, importlib.import_module("case").Row.parse("2x2:3/4"), num_parameters=26)
    assert forward == by_hand
    assert limit.update_operations(forward) == 4 * by_hand
    assert limit.step_operations(forward) == 5 * by_hand


def test_the_table_can_be_made_of_the_recorded_results() -> None:
    """Files of results have what the table asks of them, and every row of theirs is whole."""
    results = importlib.import_module("results")
    lines = [line.split(" | ") for line in results.table(results.FOLDER).splitlines()]
    assert len(lines) > 2
    assert all(len(line) == len(lines[0]) for line in lines)
