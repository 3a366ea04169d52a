from pathlib import Path

import pytest

from components.cluster.launch import run_ranks
from tests.train_grpo.references import compare
from tests.train_grpo.settings import grpo_config


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_placement_of_the_reference_does_not_change_its_scores(tmp_path: Path, num_processes: int) -> None:
    """Replicated, sharded or offloaded, and also after a reset to other weights."""
    config = grpo_config(engine__num_processes=num_processes)
    result = run_ranks(
        compare,
        config,
        {"folder": tmp_path},
        num_processes=num_processes,
        work=tmp_path / "work",
        grace_s=1,
    )
    assert result["first"] < 1e-5
    assert result["other"] < 1e-5
    assert abs(result["first_mean"] - result["other_mean"]) > 1e-3
