from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from components.grading.verifier import Verifier
from components.train_grpo import monitoring, worker


@pytest.fixture(scope="session")
def verify() -> Iterator[Verifier]:
    """Return the grader, which takes a moment to start."""
    with Verifier(num_workers=2) as verifier:
        yield verifier


@pytest.fixture(autouse=True)
def one_verifier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all runs in this process use the same grader."""
    monkeypatch.setattr(worker, "Verifier", lambda: nullcontext(request.getfixturevalue("verify")))


@pytest.fixture(autouse=True)
def matmul_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume a speed of matrix products: measuring it takes longer than most of the runs here."""
    monkeypatch.setattr(monitoring, "measure_matmul_flops", lambda *_: 1e12)
