"""What a preview says of completions, and that it asks a model as training would."""

from pathlib import Path

import pytest

from components.grading.verifier import Verdict
from components.policy.checkpoint import save
from components.prepare_data.difficulty import read_pass_rates
from components.shared import lineage
from pipelines.preview import examples, histogram, print_verdict
from tests import tiny
from tests.pipelines.conftest import Program
from tests.train_grpo.groups import completion, graded, group, rewarded
from tests.train_grpo.settings import grpo_config


def test_groups_are_counted_by_their_right_completions() -> None:
    """Of four each: one group has none, two have one, one has all."""
    groups = [
        group(*(graded("7", completion(text=f"#### {answer}")) for answer in answers))
        for answers in ((1, 2, 3, 4), (7, 1, 2, 3), (1, 2, 3, 7), (7, 7, 7, 7))
    ]
    heading, *lines = histogram(groups)
    assert heading.startswith("groups by how many of their 4 answers are right ")
    assert [line.split()[:2] for line in lines] == [["0", "1"], ["1", "2"], ["2", "0"], ["3", "0"], ["4", "1"]]
    assert [line.count("#") for line in lines] == [10, 20, 0, 0, 10]


def test_a_right_a_wrong_and_an_unanswered_completion_are_shown() -> None:
    """The first of each, with its verdict and the reason; that groups differ is an exit code."""
    texts = ("no number", "3 + 5 = 8\n#### 8", "3 + 4 = 7\n#### 7", "#### 7")
    shown = list(examples([group(*(graded("7", completion(text=text)) for text in texts))]))
    assert [text.partition(": ")[2].split()[0] for text in shown] == [Verdict.RIGHT, Verdict.WRONG, Verdict.WRONG]
    assert ["3 + 4 = 7" in shown[0], "3 + 5 = 8" in shown[1], "no number" in shown[2]] == [True] * 3
    assert [print_verdict(grpo_config(), groups) for groups in ([rewarded(0, 1)], [rewarded(0, 0)] * 30)] == [0, 1]


@pytest.mark.slow
def test_pass_rates_are_measured_once(tmp_path: Path, program: Program) -> None:
    """A second call asks only what the file lacks; one with other settings is refused."""
    save(tiny.checkpoint(), tmp_path / "model")
    rates, model = tmp_path / "rates.jsonl", str(tmp_path / "model")
    command = ["preview", "--params", "params/smoke.yaml", "--model", model, "--pass-rates", str(rates)]
    command += ["--set", "prepare_data.sources.0.num_train=12", "--set", "train_grpo.sampling.max_new_tokens=4"]
    program(*command, "--problems", "3")
    first = rates.read_text()
    assert len(first.splitlines()) == 1 + 3
    out = program(*command).out
    whole = rates.read_text()
    assert whole.startswith(first)
    measured, known = read_pass_rates(rates)
    assert (measured.model, measured.digest) == (model, lineage.digest(tmp_path / "model"))
    assert set(known.values()) == {0.0}
    assert len(known) == len(whole.splitlines()) - 1 > 3
    assert f"0 of {len(known)} problems are answered right now and then" in out
    assert "name another file" in program(*command, "--set", "train_grpo.sampling.max_new_tokens=5", code=2).error


@pytest.mark.slow
def test_a_model_is_asked_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    """One that was never trained has nothing to learn from, and one from scratch cannot be asked at all."""
    save(tiny.checkpoint(), tmp_path / "runs/named")
    monkeypatch.setattr("pipelines.preview.OUTPUTS", tmp_path)
    command = ["preview", "--params=params/smoke.yaml", "--problems=4", "--set=train_grpo.sampling.max_new_tokens=4"]
    out = program(*command, "--model", "named", code=1).out
    assert "as the model reads it" in out
    assert "truncated" in out
    assert "raise train_grpo.sampling.max_new_tokens" in out
    assert "a step of " in out
    assert "nothing to learn from: the rewards of each of the 4 groups are equal" in out
    assert "scratch:" in program(*command, code=2).error
