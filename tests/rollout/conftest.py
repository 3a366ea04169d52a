from collections.abc import Iterator

import pytest

from tests.rollout.fake_vllm import FakeVllm


@pytest.fixture
def fakes() -> Iterator[list[FakeVllm]]:
    """Two servers, which sample the tokens 2 and 1 whatever the prompt."""
    both = [FakeVllm(), FakeVllm()]
    yield both
    for fake in both:
        fake.die()
