from pathlib import Path

import pytest

from components.cluster.launch import run_ranks
from components.policy.parallel import SINGLE_PROCESS, Ranks
from components.shared.errors import RetryableError
from tests import tiny
from tests.policy import meetings


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_even_and_in_order(size: int) -> None:
    """Together they are everything; no process has two items more than another."""
    items = list(range(13))
    shares = [Ranks(rank, size).shard(items) for rank in range(size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_process_by_itself_waits_for_nobody() -> None:
    """It is all there is."""
    assert SINGLE_PROCESS.all_gather("x", "nowhere") == ["x"]
    assert SINGLE_PROCESS.is_main
    SINGLE_PROCESS.barrier("nowhere")


@pytest.mark.slow
def test_every_process_gets_what_the_others_give(tmp_path: Path) -> None:
    """In the order of the ranks, however large and however often; the store does not grow with it."""
    config = tiny.engine_config(num_processes=3)
    found = run_ranks(
        meetings.exchange,
        config,
        {"folder": tmp_path},
        num_processes=3,
        work=tmp_path / "work",
        grace_s=1,
    )
    assert found["left"] <= 3


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    """With its rank, host and process, once the deadline is over."""
    config = tiny.engine_config(num_processes=2, deadline_s=2)
    with pytest.raises(RetryableError) as raised:
        run_ranks(
            meetings.come_late,
            config,
            {"folder": tmp_path},
            num_processes=2,
            work=tmp_path / "work",
            grace_s=1,
        )
    missing = (tmp_path / "1.pid").read_text()
    message = str(raised.value)
    assert message.startswith("rank 1 (")
    assert message.endswith(f", process {missing}) of 2 did not reach the end of sampling within 2 s")


@pytest.mark.slow
@pytest.mark.parametrize("stall", [pytest.param("stall", marks=pytest.mark.long), "stall_in_deepspeed"])
def test_a_collective_has_the_deadline_too(stall: str, tmp_path: Path) -> None:
    """A rank that stands still in the middle of it is named, and the run ends, which can be tried again."""
    config = tiny.engine_config(num_processes=2, deadline_s=3)
    with pytest.raises(RetryableError) as raised:
        run_ranks(
            getattr(meetings, stall),
            config,
            {"folder": tmp_path},
            num_processes=2,
            work=tmp_path / "work",
            grace_s=1,
        )
    missing = (tmp_path / "1.pid").read_text()
    assert str(raised.value).endswith(f", process {missing}) of 2 stopped responding")
