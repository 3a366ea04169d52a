"""A strict API server in this process, for the clients that the project uses: kubernetes, kfp, model-registry.

    from tests.fake_cluster import ApiServer, Fault, script

    with ApiServer() as server:
        server.cluster.add_runtime("grpo-torch", max_restarts=1)
        server.cluster.play(script.Queued(30), script.Running(600, ("step 1", "step 2")), script.OUT_OF_MEMORY)
        server.faults.add(Fault("GET", "/trainjobs/", status=429, retry_after_s=1, times=3))
        run_the_code_under_test(server.kubeconfig(tmp_path / "config"), sleep=server.clock.sleep)
        assert server.cluster.all(kinds.TRAIN_JOBS) == []

Time stands still until the test calls `server.clock.advance(60)` or the code under test calls `server.clock.sleep`.
Kubeflow Pipelines is `server.kfp` and the model registry `server.registry`, at the same `server.url`. README.md says
which rules it enforces.
"""

from tests.fake_cluster import kinds, script
from tests.fake_cluster.http import AFTER, BEFORE, Fault, Json
from tests.fake_cluster.server import ApiServer, self_signed
from tests.fake_cluster.store import Change

__all__ = ["AFTER", "BEFORE", "ApiServer", "Change", "Fault", "Json", "kinds", "script", "self_signed"]
