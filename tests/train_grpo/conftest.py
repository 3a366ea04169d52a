from collections.abc import Iterator

import pytest

from components.grading.verifier import Verifier
from components.train_grpo import monitoring


@pytest.fixture(scope="session")
def verify() -> Iterator[Verifier]:
    """Return the grader, which takes a moment to start."""
    with Verifier(num_workers=2) as verifier:
        yield verifier


@pytest.fixture(autouse=True)
def matmul_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume a speed of matrix products: measuring it takes longer than most of the runs here."""
    monkeypatch.setattr(monitoring, "measure_matmul_flops", lambda *_: 1e12)
