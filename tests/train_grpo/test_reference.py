from pathlib import Path

import pytest

from components.cluster.launch import run_ranks
from tests.train_grpo.references import compare
from tests.train_grpo.settings import grpo_config


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_where_the_reference_is_does_not_change_what_it_says(tmp_path: Path, num_processes: int) -> None:
    """Whole, sharded or offloaded, and also once it has taken the policy's weights."""
    config = grpo_config(engine__num_processes=num_processes)
    found = run_ranks(
        compare,
        config,
        {"folder": tmp_path},
        num_processes=num_processes,
        work=tmp_path / "work",
        grace_s=1,
    )
    assert found["first"] < 1e-5
    assert found["other"] < 1e-5
    assert abs(found["first_mean"] - found["other_mean"]) > 1e-3
