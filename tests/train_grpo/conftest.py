from collections.abc import Iterator

import pytest

from components.grading.verifier import Verifier


@pytest.fixture(scope="session")
def verify() -> Iterator[Verifier]:
    """The grader, which takes a moment to start."""
    with Verifier(num_workers=2) as verifier:
        yield verifier
