import io
import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.policy.packing import TokenSequence
from components.train_grpo import reward_model as module
from components.train_grpo.reward_model import Examples, LabeledExample, Replay

EXAMPLES = [
    LabeledExample(TokenSequence((5, 6, 7), (8, 900, 151_000)), (1, 3), (0.0, 1.0)),
    LabeledExample(TokenSequence((), (20,)), (1,), (1.0,)),
    LabeledExample(TokenSequence((12,), ()), (), ()),
]
UNSCORABLE = LabeledExample(TokenSequence((5,), (8, 9)), (2,), (math.nan,))


def test_examples_come_back_as_they_were() -> None:
    """One by one, some of them, in another order, and together with others."""
    examples = Examples(EXAMPLES)
    assert list(examples) == [examples[place] for place in range(3)] == EXAMPLES
    assert list(examples[1:]) == EXAMPLES[1:]
    assert list(examples.select([2, 0])) == [EXAMPLES[2], EXAMPLES[0]]
    assert list(Examples(EXAMPLES[:1]) + Examples(EXAMPLES[1:])) == EXAMPLES
    assert math.isnan(Examples([UNSCORABLE])[0].labels[0])


def test_a_checkpoint_holds_examples_in_two_tensors() -> None:
    """Nothing else than plain values is in it, however many there are, and what was restored can be added to."""
    for values in (EXAMPLES, []):
        buffer = io.BytesIO()
        torch.save(Examples(values).state(), buffer)
        buffer.seek(0)
        restored = Examples.restored(torch.load(buffer, weights_only=True))
        restored.extend(EXAMPLES[:1])
        assert list(restored) == [*values, *EXAMPLES[:1]]


def test_a_token_takes_four_bytes() -> None:
    """In memory and in a checkpoint: an iteration's completions are held in every process."""
    num_examples, num_tokens = 50, 500
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    examples = Examples(
        LabeledExample(TokenSequence(tuple(range(100)), tuple(range(1000, 1000 + num_tokens))), (num_tokens,), (1.0,))
        for _ in range(num_examples)
    )
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_bytes = 4 * num_examples * (100 + num_tokens)
    assert num_bytes <= after - before < 1.2 * num_bytes
    buffer = io.BytesIO()
    torch.save(examples.state(), buffer)
    assert buffer.getbuffer().nbytes < 1.1 * num_bytes


# The replay -----------------------------------------------------------------------------------------------------------


def _examples(start: int, count: int) -> Examples:
    """Return examples that are told apart by their only completion token."""
    return Examples(
        LabeledExample(TokenSequence((1, 2), (number,)), (1,), (1.0,)) for number in range(start, start + count)
    )


def _numbers(examples: Iterable[LabeledExample]) -> list[int]:
    return [example.tokens.completion_ids[0] for example in examples]


def _after(*iterations: Iterable[LabeledExample]) -> Replay:
    replay = Replay()
    for examples in iterations:
        replay.add(examples)
    return replay


def _written(replay: Replay) -> bytes:
    """The bytes of its state in a checkpoint."""
    buffer = io.BytesIO()
    torch.save(replay.state(), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(("num_new", "fraction", "num_old"), [(90, 0.1, 10), (3, 0.25, 1), (50, 0.5, 50), (50, 0.0, 0)])
def test_old_examples_make_up_their_share_of_the_total(num_new: int, fraction: float, num_old: int) -> None:
    """A tenth of 100 is 10 old ones to 90 new ones: the new come first, the old from what was there, none twice."""
    old, new = _examples(0, 100), _examples(1000, num_new)
    mixed = _after(old).mix(new, fraction=fraction, seed=1)
    assert list(mixed[:num_new]) == list(new)
    assert len(mixed[num_new:]) == num_old
    assert len({*_numbers(mixed[num_new:])} & {*range(100)}) == num_old


_MANY = _after(_examples(0, 900))


@given(st.integers(0, 100), st.floats(0, 0.9))
def test_no_other_number_of_old_examples_is_nearer_to_the_share(num_new: int, fraction: float) -> None:
    """One more or one less old example is never nearer to the old-to-new ratio that was asked for."""
    num_old = len(_MANY.mix(_examples(5000, num_new), fraction=fraction, seed=1)) - num_new
    wanted = num_new * fraction / (1 - fraction)
    assert abs(num_old - wanted) <= min(abs(num_old - 1 - wanted), abs(num_old + 1 - wanted))


def test_the_first_iteration_has_only_its_own_examples() -> None:
    """Where there is nothing old, or less than asked for, what there is is taken."""
    new = _examples(1000, 90)
    assert list(Replay().mix(new, fraction=0.1, seed=1)) == list(new)
    assert sorted(_numbers(_after(_examples(0, 4)).mix(new, fraction=0.1, seed=1)[90:])) == [0, 1, 2, 3]


def test_mixing_takes_nothing_in_and_depends_on_the_seed() -> None:
    """The same seed draws the same, another one other examples, and what is kept stays as it was."""
    replay = _after(_examples(0, 100))
    before = _written(replay)
    first, again, other = (list(replay.mix(_examples(1000, 90), fraction=0.1, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert _written(replay) == before


def test_all_earlier_iterations_are_drawn_from_alike() -> None:
    """Of three iterations of different size, each gives its share by size."""
    replay = _after(_examples(0, 50), _examples(100, 100), _examples(200, 50))
    new = _examples(1000, 90)
    draws = [_numbers(replay.mix(new, fraction=0.1, seed=seed)[90:]) for seed in range(200)]
    drawn = Counter(number // 100 for numbers in draws for number in numbers)
    for iteration, share in enumerate((0.25, 0.5, 0.25)):
        assert abs(drawn[iteration] / 2000 - share) < 0.05


def test_a_full_reservoir_is_a_uniform_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for 100, each quarter of 2,000 examples is kept alike, in whatever parts they came."""
    monkeypatch.setattr(module, "_CAPACITY", 100)
    examples, new = _examples(0, 2000), _examples(5000, 900)
    kept: Counter[int] = Counter()
    for size in range(30, 70):
        replay = _after(*(examples[start : start + size] for start in range(0, 2000, size)))
        numbers = _numbers(replay.mix(new, fraction=0.5, seed=1)[900:])
        assert len(set(numbers)) == len(numbers) == 100
        kept.update(number // 500 for number in numbers)
    assert all(abs(kept[quarter] / 4000 - 0.25) < 0.03 for quarter in range(4))


def test_a_restored_replay_goes_on_as_the_saved_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is what a checkpoint may hold, and after it both take in, keep and draw the same."""
    monkeypatch.setattr(module, "_CAPACITY", 10)
    steps = LabeledExample(TokenSequence((1, 2), (3, 4, 5)), (1, 3), (0.0, 1.0))
    saved = _after(_examples(0, 15), [steps] * 5)
    restored = Replay()
    restored.restore(torch.load(io.BytesIO(_written(saved)), weights_only=True))
    for replay in (saved, restored):
        replay.add(_examples(100, 30))
    assert _written(restored) == _written(saved)
    new = _examples(1000, 9)
    assert list(restored.mix(new, fraction=0.5, seed=3)) == list(saved.mix(new, fraction=0.5, seed=3))


def test_what_cannot_be_scored_is_not_kept() -> None:
    """Ends without a verdict are left out, and examples without any other, so that old ones are all of use."""
    tokens = TokenSequence((1, 2), (3, 4, 5))
    replay = _after([LabeledExample(tokens, (1, 3), (math.nan, 1.0)), LabeledExample(tokens, (3,), (math.nan,))])
    assert list(replay.mix(Examples(), fraction=0.5, seed=1)) == []
    assert list(replay.mix(_examples(7, 1), fraction=0.5, seed=1))[1:] == [LabeledExample(tokens, (3,), (1.0,))]
    assert replay.state()["num_seen"] == 1
