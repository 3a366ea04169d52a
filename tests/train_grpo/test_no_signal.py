from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.policy.checkpoint import save
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.problem import Split, write_problems
from components.train_grpo.no_signal import Row, limit_reached, refuse_limit, refuse_nothing_learned, warn
from components.train_grpo.train import train
from tests import tiny
from tests.train_grpo.settings import grpo_config

LEVEL, DIFFERENT, SOLVED = "level", "different", "solved"
OUTPUTS = ("policy", "training", "timings")


def _rows(*kinds: str) -> list[Row]:
    return [
        {
            "groups_without_spread_fraction": 0.75 if kind == DIFFERENT else 1.0,
            "groups_all_right_fraction": 1.0 if kind == SOLVED else 0.5,
            "reward": None,
            "accuracy": 0.5,
            "truncated_fraction": 0.25,
        }
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("kinds", "reached"),
    [
        ([LEVEL] * 3, True),
        ([DIFFERENT, *[LEVEL] * 3], True),
        ([LEVEL] * 2, False),
        ([LEVEL, LEVEL, DIFFERENT, LEVEL], False),
        ([LEVEL] * 3 + [DIFFERENT], False),
        ([SOLVED] * 9, False),
        ([LEVEL, SOLVED, LEVEL, LEVEL], False),
    ],
)
def test_the_limit_is_of_steps_in_a_row(kinds: Sequence[str], reached: bool) -> None:
    """A step with a signal, or with nothing left to learn, begins the count anew."""
    rows = _rows(*kinds)
    assert limit_reached(grpo_config(reward__max_steps_without_signal=3), rows) is reached
    assert not limit_reached(grpo_config(reward__max_steps_without_signal=0), rows)


def test_the_error_says_what_was_seen_and_what_to_do() -> None:
    """In one line, with the keys that it takes."""
    with pytest.raises(PipelineError) as error:
        refuse_limit(grpo_config(reward__max_steps_without_signal=3), _rows(*[LEVEL] * 3))
    message = str(error.value)
    assert message.startswith("nothing to learn from in the last 3 steps: the rewards of each group were all equal")
    assert "(accuracy 0.5, share cut off 0.25)" in message
    assert "train_grpo.reward.weights" in message
    assert message.endswith("train_grpo.reward.max_steps_without_signal: 0")
    assert "\n" not in message


def test_a_warning_comes_once_in_a_row_of_such_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Long before the run stops."""
    kinds = [LEVEL] * 8 + [DIFFERENT] + [LEVEL] * 5
    for number in range(1, len(kinds) + 1):
        warn(_rows(*kinds[:number]))
    warned = capsys.readouterr().out.splitlines()
    assert len(warned) == 2
    assert all(line.startswith("train_grpo: warning: nothing to learn from in the last 5 steps") for line in warned)


def test_a_run_with_one_step_that_taught_something_ends_well() -> None:
    """One without any does not, unless every answer was right or the limit is switched off."""
    config = grpo_config(reward__max_steps_without_signal=100)
    refuse_nothing_learned(config, _rows(DIFFERENT, LEVEL, SOLVED))
    refuse_nothing_learned(config, _rows(SOLVED, SOLVED))
    for kinds in ((LEVEL, LEVEL), (LEVEL, SOLVED)):
        with pytest.raises(PipelineError, match="no rollout of the run had anything to learn from"):
            refuse_nothing_learned(config, _rows(*kinds))
        refuse_nothing_learned(grpo_config(reward__max_steps_without_signal=0), _rows(*kinds))


def _train(folder: Path, inputs: dict[str, Path], limit: int) -> None:
    outputs = {name: folder / name for name in OUTPUTS}
    for path in outputs.values():
        path.mkdir(parents=True, exist_ok=True)
    config = grpo_config(num_steps=4, prompts_per_step=1, group_size=2, reward__max_steps_without_signal=limit)
    train(config, **inputs, **outputs, work=folder / "work")


def test_a_run_without_a_signal_stops_and_can_go_on(tmp_path: Path) -> None:
    """Its last step is kept: the same again stops at once, and without the limit it ends as one that never stopped."""
    inputs = {name: tmp_path / name for name in ("problems", "reference")}
    for path in inputs.values():
        path.mkdir()
    write_problems(inputs["problems"], Split.TRAIN, [tiny.problem(3, answer="12345")])
    save(tiny.checkpoint(), inputs["reference"])
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    for _ in range(2):
        with pytest.raises(PipelineError, match="in the last 2 steps"):
            _train(stopped, inputs, 2)
        assert [path.name for path in (stopped / "work/checkpoints").glob("step-*")] == ["step-000002"]
    _train(stopped, inputs, 0)
    _train(straight, inputs, 0)
    for name in ("policy/model.safetensors", "training/steps.jsonl"):
        assert (stopped / name).read_bytes() == (straight / name).read_bytes()
    rows: list[dict[str, Any]] = [row for _, row in jsonl.read_rows(stopped / "training/steps.jsonl")]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
