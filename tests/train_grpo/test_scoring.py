import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from components.grading.verifier import Grade, Submission, Verdict, Verifier
from components.policy.checkpoint import Checkpoint
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion
from components.shared.answer_policy import AnswerPolicy
from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.train_grpo.config import RewardModelConfig
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.scoring import Scored, Scorer
from components.train_grpo.steps import Step
from tests import tiny
from tests.train_grpo.groups import scored
from tests.train_grpo.settings import grpo_config

PROBLEM = tiny.problem(3)  # its answer is 6
WORKED = "1+1=2\n2+2=5\n#### 6"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """Return the policy whose tokens the completions are made of."""
    return tiny.checkpoint()


def _said(checkpoint: Checkpoint, *texts: str, finished: bool = True) -> list[Completion]:
    """Completions as the policy of `checkpoint` would give them."""
    prompt = checkpoint.prompt_ids(PROBLEM.question)
    end = checkpoint.end_ids[:1] if finished else ()
    sequences = [TokenSequence(prompt, (*checkpoint.encode(text), *end)) for text in texts]
    return [
        Completion(sequence, (0.0,) * len(sequence.completion_ids), text, finished)
        for sequence, text in zip(sequences, texts, strict=True)
    ]


@pytest.fixture
def score(checkpoint: Checkpoint, verify: Verifier) -> Callable[..., list[Scored]]:
    """Return what scores the completions of one problem under some settings."""

    def scores(
        said: Sequence[Completion], *, problem: Problem = PROBLEM, model: RewardModel | None = None, **changes: Any
    ) -> list[Scored]:
        (found,) = Scorer(grpo_config(**changes), checkpoint, verify, model)([problem], [said])
        return found

    return scores


def test_rewards_of_a_completion_stand_with_its_last_step() -> None:
    """By hand: steps 1, 0, 1 and half of the format reward; the order of the weights does not matter."""
    each = scored({"steps": [1, 0, 1], "format": [1]}, ends=[1, 2, 3])
    assert each.combined({"steps": 1.0, "format": 0.5}) == (1.0, 0.0, 1.5)
    assert each.combined({"format": 0.5, "steps": 2.0}) == (2.0, 0.0, 2.5)


def test_the_weighted_sum_by_hand() -> None:
    """Three rewards of one completion, one with a negative weight."""
    each = scored({"accuracy": [1], "format": [0.5], "overlong": [-0.25]})
    weights = {"accuracy": 2.0, "format": -1.0, "overlong": 4.0}
    assert each.combined(weights) == (2 - 0.5 - 1,)


def test_a_missing_reward_leaves_its_step_without_any() -> None:
    """NaN wins over whatever else the step is worth, and does not reach the other steps."""
    found = scored({"steps": [1, 0, math.nan], "format": [1]}, ends=[1, 2, 3]).combined({"steps": 1.0, "format": 1.0})
    assert found[:2] == (1.0, 0.0)
    assert math.isnan(found[2])


def test_without_reward_nothing_is_worth_anything() -> None:
    """Every step is without any of the rewards; completion, grade and steps stay."""
    before = scored({"steps": [1, 0], "format": [1]}, ends=[1, 3])
    after = before.without_reward()
    assert (after.completion, after.grade, after.steps) == (before.completion, before.grade, before.steps)
    assert list(after.rewards) == ["steps", "format"]
    assert all(math.isnan(value) for value in after.combined({"steps": 1.0, "format": 0.0}))


def test_outcome_supervision_rewards_the_completion_as_one_step(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]]
) -> None:
    """The step is all of its tokens; every reward with a weight is there, and no other."""
    completions = _said(checkpoint, WORKED, "#### 6", "1+1=2\n#### 7")
    found = score(
        completions,
        sampling__max_new_tokens=24,
        reward__weights={"format": 1.0, "accuracy": 1.0, "overlong": 1.0},
        reward__overlong_buffer_tokens=16,
    )
    lengths = [len(each.tokens.completion_ids) for each in completions]
    late = [-max(0, length - 8) / 16 for length in lengths]
    assert [each.rewards for each in found] == [
        {"format": (1.0,), "accuracy": (1.0,), "overlong": (late[0],)},
        {"format": (0.0,), "accuracy": (1.0,), "overlong": (late[1],)},
        {"format": (1.0,), "accuracy": (0.0,), "overlong": (late[2],)},
    ]
    assert min(late) < max(late) == 0
    assert [each.steps for each in found] == [
        (Step(length, each),) for length, each in zip(lengths, (1.0, 1.0, 0.0), strict=True)
    ]
    assert [each.completion for each in found] == completions
    assert [each.grade.verdict for each in found] == ["right", "right", "wrong"]


def test_process_supervision_rewards_each_worked_line_and_the_answer(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]]
) -> None:
    """By hand: a right line, a wrong one and a right answer; each step ends with its line's last token."""
    weights = {"steps": 1.0, "format": 0.5}
    (said,) = _said(checkpoint, WORKED)
    (found,) = score([said], reward__weights=weights, reward__supervision="process")
    assert found.rewards == {"steps": (1.0, 0.0, 1.0), "format": (1.0,)}
    assert found.combined(weights) == (1.0, 0.0, 1.5)
    ends = [step.end for step in found.steps]
    assert [checkpoint.decode(said.tokens.completion_ids[:end]) for end in ends] == [
        "1+1=2\n",
        "1+1=2\n2+2=5\n",
        WORKED,
    ]
    assert ends[-1] == len(said.tokens.completion_ids)


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_a_reward_model_is_read_at_the_end_of_each_step(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], supervision: str
) -> None:
    """The reward of each step is what the model itself says there, completion by completion."""
    model_config = RewardModelConfig(
        base="reference", initial_rollouts=1, learning_rate=1e-3, epochs=1, replay_fraction=0.1
    )
    model = RewardModel.load(model_config, checkpoint, micro_batch_tokens=100)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.model.score.weight)  # a new head says the same of everything
    found = score(
        _said(checkpoint, WORKED, "#### 7"),
        model=model,
        reward__weights={"reward_model": 1.0, "accuracy": 1.0},
        reward__supervision=supervision,
        reward__model=model_config.model_dump(),
    )
    assert [len(each.rewards["reward_model"]) for each in found] == ([3, 1] if supervision == "process" else [1, 1])
    for each in found:
        (expected,) = model.score([each.completion.tokens], [tuple(step.end for step in each.steps)])
        assert each.rewards["reward_model"] == pytest.approx(expected, rel=1e-5)
        assert len(set(expected)) == len(each.steps)
    assert [each.rewards["accuracy"] for each in found] == [(1.0,), (0.0,)]


@pytest.mark.parametrize("supervision", ["outcome", "process"])
def test_what_was_cut_off_is_wrong_or_has_no_reward_at_all(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], supervision: str
) -> None:
    """`score` counts it as a wrong answer, `mask` gives none of its steps a reward; finished ones are untouched."""
    weights = {"accuracy": 1.0} if supervision == "outcome" else {"steps": 1.0}
    both = [*_said(checkpoint, WORKED, finished=False), *_said(checkpoint, WORKED)]

    def combined(truncated: str) -> tuple[Scored, Scored, list[Sequence[float]]]:
        one, other = score(
            both, reward__weights=weights, reward__supervision=supervision, sampling__truncated=truncated
        )
        return one, other, [each.combined(weights) for each in (one, other)]

    cut_off, _, (rewards, finished) = combined("score")
    assert (cut_off.grade.verdict, rewards[-1], finished[-1]) == ("wrong", 0.0, 1.0)
    cut_off, _, (rewards, finished) = combined("mask")
    assert cut_off.grade.verdict == "wrong"
    assert all(math.isnan(reward) for reward in rewards)
    assert finished == combined("score")[2][1]


def test_an_answer_that_cannot_be_graded_has_no_reward(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]]
) -> None:
    """Under outcome supervision that is the whole completion, under process supervision its last step."""
    unreadable = tiny.problem(3, answer="\\frac{1}{")
    (said,) = _said(checkpoint, WORKED)
    (found,) = score([said], problem=unreadable)
    assert math.isnan(found.rewards["accuracy"][0])
    assert list(found.rewards) == ["accuracy"]
    (found,) = score([said], problem=unreadable, reward__weights={"steps": 1.0}, reward__supervision="process")
    assert found.rewards["steps"][:2] == (1.0, 0.0)
    assert math.isnan(found.rewards["steps"][2])


def test_a_rollout_is_graded_in_one_call_and_each_completion_against_its_own_problem(checkpoint: Checkpoint) -> None:
    """Groups may differ in size; what was cut off does not trouble the grader."""
    calls: list[list[Submission]] = []

    class Listening(Verifier):
        def __call__(self, submissions: Sequence[Submission]) -> list[Grade]:
            calls.append(list(submissions))
            return super().__call__(submissions)

    problems = [PROBLEM, tiny.problem(4), tiny.problem(5)]  # 6, 8 and 10
    said = [
        _said(checkpoint, "#### 6", "#### 8"),
        [*_said(checkpoint, "#### 8"), *_said(checkpoint, "#### 8", finished=False), *_said(checkpoint, "#### 6")],
        [],
    ]
    with Listening(num_workers=1) as verify:
        found = Scorer(grpo_config(), checkpoint, verify, None)(problems, said)
    assert [[each.rewards["accuracy"] for each in group] for group in found] == [
        [(1.0,), (0.0,)],
        [(1.0,), (0.0,), (0.0,)],
        [],
    ]
    assert [[each.completion for each in group] for group in found] == said
    (call,) = calls
    assert [(each.gold, each.response) for each in call] == [
        ("6", "#### 6"),
        ("6", "#### 8"),
        ("8", "#### 8"),
        ("8", "#### 6"),
    ]


def test_the_answer_is_looked_for_where_the_prompt_of_the_policy_asks_for_it(
    checkpoint: Checkpoint, verify: Verifier
) -> None:
    """The accuracy and the format of an answer in another place are zero."""
    boxing = replace(checkpoint, config=checkpoint.config.model_copy(update={"answer": AnswerPolicy.BOXED}))
    said = _said(checkpoint, "1+1=2\n#### 6", r"1+1=2, so \boxed{6}")
    scorer = Scorer(grpo_config(reward__weights={"accuracy": 1.0, "format": 1.0}), boxing, verify, None)
    (found,) = scorer([PROBLEM], [said])
    assert [each.rewards for each in found] == [
        {"accuracy": (0.0,), "format": (0.0,)},
        {"accuracy": (1.0,), "format": (1.0,)},
    ]


def test_repetition_counts_the_n_grams_of_the_config(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]]
) -> None:
    """By hand, of seven tokens and the end: two of seven 2-grams are repetitions, and one of six 3-grams."""
    said = _said(checkpoint, "1+2\n1+2")
    for n, expected in ((2, -2 / 7), (3, -1 / 6)):
        (found,) = score(said, reward__weights={"repetition": 1.0}, reward__repetition_ngram_tokens=n)
        assert found.rewards["repetition"] == pytest.approx((expected,))


def test_length_is_compared_within_a_group(checkpoint: Checkpoint, verify: Verifier) -> None:
    """By hand, of 2, 4 and 6 tokens and the end: the next group's lengths change nothing, nor does what is masked."""
    config = grpo_config(reward__weights={"length": 1.0}, sampling__truncated="mask")
    texts = ["#### 6", "1+1=2\n#### 6", "1+1=2\n1+1=2\n#### 6"]
    longest = _said(checkpoint, *texts)
    cut_off = _said(checkpoint, 9 * WORKED, finished=False)
    found = Scorer(config, checkpoint, verify, None)([PROBLEM] * 2, [[*longest, *cut_off], longest[:1]])
    assert [each.rewards["length"][0] for each in found[0]] == pytest.approx([0.5, 0.0, -0.5, math.nan], nan_ok=True)
    assert found[1][0].rewards["length"] == (0.0,)


OWN = """
calls = []

def fails(problem, completion, grade):
    calls.append(completion.text)
    if "7" in completion.text:
        raise KeyError("nothing\\nhere")
    return 0.25

def empty(problem, completion, grade):
    return None if "7" in completion.text else 0.5

def nan(problem, completion, grade):
    return float("nan")

def huge(problem, completion, grade):
    return 10 ** 400

def infinite(problem, completion, grade):
    return float("inf")

def opposite(problem, completion, grade):
    return 1e308 if "7" in completion.text else -1e308

def leaves(problem, completion, grade):
    raise SystemExit(0)

def closes(problem, completion, grade):
    raise GeneratorExit

def stops(problem, completion, grade):
    raise KeyboardInterrupt

def numbers(problem, completion, grade):
    import fractions
    import numpy
    return {"6": fractions.Fraction(1, 4), "7": numpy.float32(0.5), "8": True}[grade.extracted]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return the name of a reward of the user's, in a module of each test's own."""
    module = f"own_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda function: f"{module}:{function}"


def test_a_reward_that_raises_leaves_its_completion_without_any(
    checkpoint: Checkpoint,
    score: Callable[..., list[Scored]],
    own: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The others keep theirs; the failure says which reward, what and where, and is shown once."""
    name = own("fails")
    weights = {"accuracy": 1.0, name: 2.0}
    found = score(_said(checkpoint, "#### 6", "#### 7", "#### 8", "#### 77"), reward__weights=weights)
    assert [each.failure is None for each in found] == [True, False, True, False]
    assert [each.combined(weights)[0] for each in found] == pytest.approx([1.5, math.nan, 0.5, math.nan], nan_ok=True)
    assert all(math.isnan(value) for values in found[1].rewards.values() for value in values)
    failure = found[1].failure
    assert failure is not None
    assert failure.kind == f"reward {name} raised KeyError"
    assert failure.message == f"reward {name} raised KeyError: 'nothing\\nhere' ({name.split(':')[0]}.py, line 7)"
    assert found[1].unscorable == failure
    assert found[0].unscorable is None
    shown = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert shown == [f"train_grpo: warning: no reward for a completion of {PROBLEM.id}: {failure.message}"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("empty", "returned None"),
        ("nan", "returned nan"),
        ("infinite", "returned inf"),
        ("huge", "raised OverflowError"),
        ("opposite", "is 1e+308 in magnitude"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_a_failure(
    checkpoint: Checkpoint,
    score: Callable[..., list[Scored]],
    own: Callable[[str], str],
    function: str,
    message: str,
) -> None:
    """What was returned is shown."""
    name = own(function)
    (found,) = score(_said(checkpoint, "#### 7"), reward__weights={name: 1.0})
    assert found.failure is not None
    assert f"reward {name} {message}" in found.failure.message
    assert math.isnan(found.combined({name: 1.0})[0])


def test_a_weight_can_make_a_reward_too_large(checkpoint: Checkpoint, score: Callable[..., list[Scored]]) -> None:
    """Of our own rewards too: where the squares of a group overflow, every advantage is zero."""
    found = score(_said(checkpoint, "#### 6", "#### 7"), reward__weights={"accuracy": 1e200})
    assert [each.failure is None for each in found] == [False, True]
    failure = found[0].failure
    assert failure is not None
    assert failure.message.startswith("reward accuracy is 1 in magnitude, with a weight of 1e+200")


def test_what_is_no_verdict_may_be_nan_but_not_infinite(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], own: Callable[[str], str]
) -> None:
    """Infinity would be a reward."""
    problem = tiny.problem(3, answer="\\frac{1}{")
    for function, fails in (("nan", False), ("infinite", True)):
        (found,) = score(_said(checkpoint, WORKED), problem=problem, reward__weights={own(function): 1.0})
        assert (found.failure is not None) is fails


@pytest.mark.parametrize(("function", "what"), [("leaves", "SystemExit: 0"), ("closes", "GeneratorExit")])
def test_a_reward_that_would_end_the_process_is_an_error(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], own: Callable[[str], str], function: str, what: str
) -> None:
    """With an exit code of its own choice, a run without outputs would pass for one that is done."""
    name = own(function)
    with pytest.raises(PipelineError) as error:
        score(_said(checkpoint, "#### 6"), reward__weights={name: 1.0})
    message = str(error.value)
    assert message.startswith(f"train_grpo.reward.weights.{name}: reward {name} raised {what}")
    assert PROBLEM.id in message
    assert "\n" not in message


def test_any_kind_of_real_number_is_a_reward(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], own: Callable[[str], str]
) -> None:
    """Fractions, numpy's numbers and truth values become floats."""
    name = own("numbers")
    found = score(_said(checkpoint, "#### 6", "#### 7", "#### 8"), reward__weights={name: 1.0})
    assert [each.rewards[name] for each in found] == [(0.25,), (0.5,), (1.0,)]
    assert all(type(each.rewards[name][0]) is float for each in found)


def test_ctrl_c_inside_a_reward_stops_the_run(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], own: Callable[[str], str]
) -> None:
    """What is no error of the reward is not taken for one."""
    with pytest.raises(KeyboardInterrupt):
        score(_said(checkpoint, "#### 6"), reward__weights={own("stops"): 1.0})


def test_no_reward_is_asked_of_what_is_masked(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]], own: Callable[[str], str]
) -> None:
    """A masked completion cannot fail: it has no reward, and is not unscorable."""
    (found,) = score(
        _said(checkpoint, "#### 7", finished=False), reward__weights={own("fails"): 1.0}, sampling__truncated="mask"
    )
    assert (found.failure, found.unscorable) == (None, None)
    assert math.isnan(found.combined({own("fails"): 1.0})[0])


def test_a_completion_without_verdict_is_unscorable_for_the_graders_reason(
    checkpoint: Checkpoint, score: Callable[..., list[Scored]]
) -> None:
    """That is no failure of a reward."""
    (found,) = score(_said(checkpoint, WORKED), problem=tiny.problem(3, answer="\\frac{1}{"))
    assert found.grade.verdict is Verdict.UNSCORABLE
    assert found.failure is None
    assert found.unscorable is not None
    assert found.grade.reason in found.unscorable.message


@pytest.mark.slow
def test_code_is_worth_its_tests(checkpoint: Checkpoint, score: Callable[..., list[Scored]]) -> None:
    """By hand, of two tests: both passed, one, none, no code at all, and right code that was cut off."""
    problem = tiny.problem(3, answer="assert double(2) == 4\nassert double(3) == 6")
    codes = [f"```python\ndef double(x):\n    return {value}\n```" for value in ("2 * x", "x ** 2", "x")]
    finished = _said(checkpoint, *codes, "double it")
    cut_off = _said(checkpoint, codes[0], finished=False)
    found = score(
        [*finished, *cut_off], problem=problem, reward__weights={"accuracy": 1.0, "code_tests": 1.0, "format": 1.0}
    )
    assert [[values[0] for values in each.rewards.values()] for each in found] == [
        [1.0, 1.0, 1.0],
        [0.0, 0.5, 1.0],
        [0.0, 0.0, 1.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
