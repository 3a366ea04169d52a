import json
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.shared.errors import PipelineError
from components.shared.problem import Problem
from components.train_grpo.config import PromptsConfig
from components.train_grpo.prompts import Prompts
from tests import tiny


def _config(*, max_pass_rate: float | None = None, **weights: float) -> PromptsConfig:
    return PromptsConfig(source_weights=weights, max_pass_rate=max_pass_rate)


def _problems(**sizes: int) -> list[Problem]:
    """Problems called `a0`, `a1` ... of source `a`, and so on."""
    names = [(source, number) for source, size in sizes.items() for number in range(size)]
    return [tiny.problem(number, id=f"{source}{number}", source=source) for source, number in names]


def _ids(prompts: Prompts, *counts: int) -> list[str]:
    """Return the ids of batches of these sizes, one after another."""
    return [problem.id for count in counts for problem in prompts.next_batch(count)]


def _assert_passes(ids: Sequence[str], problems: Sequence[Problem]) -> None:
    """Each stretch of as many draws as there are problems holds each once; the last one may be cut short."""
    size = len(problems)
    for start in range(0, len(ids), size):
        stretch = ids[start : start + size]
        assert len(set(stretch)) == len(stretch)
        assert set(stretch) <= {problem.id for problem in problems}


@given(data=st.data(), size=st.integers(1, 12), seed=st.integers())
def test_every_pass_takes_each_problem_once(data: st.DataObject, size: int, seed: int) -> None:
    """Whatever the batches, no problem is skipped, none comes twice in a pass, and none twice in a batch."""
    problems = _problems(a=size)
    prompts = Prompts(problems, _config(), seed=seed)
    batches = [_ids(prompts, count) for count in data.draw(st.lists(st.integers(0, size), max_size=12))]
    assert all(len(set(batch)) == len(batch) for batch in batches)
    _assert_passes([problem_id for batch in batches for problem_id in batch], problems)


@given(
    weights=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5)),
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=20),
)
def test_shares_of_sources_are_exact_over_time(weights: tuple[int, int, int], counts: list[int]) -> None:
    """No source is ever a whole problem ahead, all are even after as many draws as the weights add up to."""
    config = _config(**dict(zip("abc", weights, strict=True)))
    drawn = _ids(Prompts(_problems(a=12, b=12, c=12), config, seed=1), *counts)
    for source in "abc":
        _assert_passes([each for each in drawn if each[0] == source], _problems(**{source: 12}))
    for total in range(1, len(drawn) + 1):
        by_source = Counter(problem_id[0] for problem_id in drawn[:total])
        for source, weight in zip("abc", weights, strict=True):
            assert by_source[source] * sum(weights) < weight * total + sum(weights)
            assert total % sum(weights) or by_source[source] * sum(weights) == weight * total


def test_weights_that_do_not_fit_are_refused() -> None:
    """Weights and problems name the same sources."""
    named = r"prompts\.source_weights: there are weights for gsm8k, maths, but problems from gsm8k, math"
    with pytest.raises(PipelineError, match=named):
        Prompts(_problems(gsm8k=2, math=2), _config(gsm8k=1.0, maths=1.0), seed=1)
    prompts = Prompts(_problems(a=2, b=90), _config(a=3, b=1), seed=1)  # no batch could keep the weights
    with pytest.raises(PipelineError, match="6 of prompts_per_step = 8 have to come from `a`, which has only 2"):
        prompts.next_batch(8)


def test_a_solved_problem_is_left_out_of_later_passes() -> None:
    """From 3 of 4 right on; it is back if a later group does not solve it, and nothing unscored counts."""
    prompts = Prompts(_problems(a=4), _config(max_pass_rate=0.75), seed=1)
    assert set(_ids(prompts, 2)) < {"a0", "a1", "a2", "a3"}
    for problem_id, num_right, num_scored in (("a0", 3, 4), ("a1", 2, 4), ("a2", 4, 4), ("a3", 0, 0)):
        prompts.record(problem_id, num_right=num_right, num_scored=num_scored)
    assert len(set(_ids(prompts, 2))) == 2, "the pass that has begun goes on"
    assert [set(_ids(prompts, 2)) for _ in range(3)] == [{"a1", "a3"}] * 3
    prompts.record("a2", num_right=1, num_scored=4)
    assert set(_ids(prompts, 3)) == {"a1", "a2", "a3"}
    for problem_id in ("a1", "a2", "a3"):  # too few are left for a step: all are back
        prompts.record(problem_id, num_right=4, num_scored=4)
    assert set(_ids(prompts, 4)) == {"a0", "a1", "a2", "a3"}


_CONFIGS = [_config(), _config(a=3, b=1), _config(max_pass_rate=0.5), _config(max_pass_rate=0.5, a=3, b=1)]


def _train(prompts: Prompts, counts: Sequence[int]) -> list[str]:
    """Draw batches, and record for each of their problems an outcome that differs from problem to problem."""
    drawn = []
    for count in counts:
        for problem in prompts.next_batch(count):
            drawn.append(problem.id)
            prompts.record(problem.id, num_right=len(drawn) * int(problem.id[1]) % 5, num_scored=4 + len(drawn) % 2)
    return drawn


@given(
    config=st.sampled_from(_CONFIGS),
    before=st.lists(st.integers(0, 6), max_size=8),
    elsewhere=st.lists(st.integers(0, 6), max_size=3),
    after=st.lists(st.integers(0, 6), max_size=8),
    seed=st.integers(),
)
def test_a_run_resumes_exactly(
    config: PromptsConfig, before: list[int], elsewhere: list[int], after: list[int], seed: int
) -> None:
    """Restored at any point, through JSON, over whatever was drawn there, the draws and the state go on alike."""
    problems = _problems(a=7, b=3)
    unbroken = Prompts(problems, config, seed=seed)
    _train(unbroken, before)
    saved = unbroken.state()
    text = json.dumps(saved)
    resumed = Prompts(problems, config, seed=seed)
    _train(resumed, elsewhere)
    resumed.restore(json.loads(text))
    assert resumed.state() == saved
    assert _train(resumed, after) == _train(unbroken, after)
    assert resumed.state() == unbroken.state()
    assert saved == json.loads(text)  # a snapshot: no run has written to it
