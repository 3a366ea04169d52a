import os
from pathlib import Path

import pytest

from components.cluster.config import ClusterConfig, ClusterStage, on_cluster
from components.shared.environment import SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.train_grpo.samplers import samplers_running
from tests.train_grpo.settings import grpo_config
from tests.train_grpo.test_own_weights import SERVERS

VLLM = {key: SERVERS[key] for key in SERVERS if key not in ("num_servers", "devices", "lost_deadline_s")}


def _cluster(folder: Path, rollout_servers: int) -> ClusterStage:
    config = ClusterConfig(image="gpu:1", mount=str(folder), rollout_servers=rollout_servers)
    return ClusterStage(config, "0f1e2d3c", "train_grpo", folder / "records")


def test_on_a_cluster_weights_go_by_way_of_the_volume(tmp_path: Path) -> None:
    """No memory is shared by pods, and servers are pods of the job: none is started here."""
    for sampler in ({"sampler__vllm": VLLM}, {"sampler__servers": SERVERS}):
        config = grpo_config(**sampler)
        with on_cluster(_cluster(tmp_path, 1)), samplers_running(config, tmp_path, tmp_path):
            assert os.environ[WEIGHTS_VARIABLE] == str(tmp_path / "weights")
            assert SERVERS_VARIABLE not in os.environ
        assert WEIGHTS_VARIABLE not in os.environ


def test_servers_need_pods(tmp_path: Path) -> None:
    """As many as the cluster's settings say, which may be none."""
    config = grpo_config(sampler__servers=SERVERS)
    with (
        on_cluster(_cluster(tmp_path, 0)),
        pytest.raises(PipelineError, match=r"set cluster.rollout_servers"),
        samplers_running(config, tmp_path, tmp_path),
    ):
        pass
