import io
import math
import tracemalloc

import torch

from components.policy.packing import TokenSequence
from components.train_grpo.judged import Examples, Judged

EXAMPLES = [
    Judged(TokenSequence((5, 6, 7), (8, 900, 151_000)), (1, 3), (0.0, 1.0)),
    Judged(TokenSequence((), (20,)), (1,), (1.0,)),
    Judged(TokenSequence((12,), ()), (), ()),
]
UNSCORABLE = Judged(TokenSequence((5,), (8, 9)), (2,), (math.nan,))


def test_examples_come_back_as_they_were() -> None:
    """One by one, some of them, in another order, and together with others."""
    examples = Examples(EXAMPLES)
    assert list(examples) == [examples[place] for place in range(3)] == EXAMPLES
    assert list(examples[1:]) == EXAMPLES[1:]
    assert list(examples.chosen([2, 0])) == [EXAMPLES[2], EXAMPLES[0]]
    assert list(Examples(EXAMPLES[:1]) + Examples(EXAMPLES[1:])) == EXAMPLES
    assert math.isnan(Examples([UNSCORABLE])[0].labels[0])


def test_a_checkpoint_holds_examples_in_two_tensors() -> None:
    """Nothing else than plain values is in it, however many there are, and what was restored can be added to."""
    for given in (EXAMPLES, []):
        buffer = io.BytesIO()
        torch.save(Examples(given).state(), buffer)
        buffer.seek(0)
        restored = Examples.restored(torch.load(buffer, weights_only=True))
        restored.extend(EXAMPLES[:1])
        assert list(restored) == [*given, *EXAMPLES[:1]]


def test_a_token_takes_four_bytes() -> None:
    """In memory and in a checkpoint: an iteration's completions are held in every process."""
    num_examples, num_tokens = 50, 500
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    examples = Examples(
        Judged(TokenSequence(tuple(range(100)), tuple(range(1000, 1000 + num_tokens))), (num_tokens,), (1.0,))
        for _ in range(num_examples)
    )
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_bytes = 4 * num_examples * (100 + num_tokens)
    assert num_bytes <= after - before < 1.2 * num_bytes
    buffer = io.BytesIO()
    torch.save(examples.state(), buffer)
    assert buffer.getbuffer().nbytes < 1.1 * num_bytes
