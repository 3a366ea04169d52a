from collections.abc import Iterator

import pytest

from components.grading.verifier import Verifier


@pytest.fixture(scope="session")
def verify() -> Iterator[Verifier]:
    """The one verifier of this folder's tests, as the stages make it."""
    with Verifier() as verifier:
        yield verifier
