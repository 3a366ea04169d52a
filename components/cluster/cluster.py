"""Whether what is run together runs on a cluster: said once, around the call of a stage."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from components.cluster.config import ClusterConfig
from components.shared.errors import PipelineError

_RUN_ID = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Cluster:
    """A stage of a run on a cluster."""

    config: ClusterConfig
    run_id: str
    stage: str
    records: Path
    """Folder in which the logs of all pods, events and the job's manifest are kept; it outlives the run."""

    def __post_init__(self) -> None:
        if not _RUN_ID.fullmatch(self.run_id):
            raise PipelineError(
                f"run_id: {self.run_id!r} cannot be a label; expected the id of the run, up to 63 of a-z, 0-9 and -"
            )

    @property
    def label(self) -> str:
        """The stage as it stands in labels."""
        return self.stage.replace("_", "-")


_active: ContextVar[Cluster | None] = ContextVar("cluster", default=None)


def current() -> Cluster | None:
    """Return the cluster on which ranks are to run, or None where they run on this machine."""
    return _active.get()


@contextmanager
def active(cluster: Cluster) -> Iterator[None]:
    """Have ranks that are started in the block run on a cluster."""
    before = _active.set(cluster)
    try:
        yield
    finally:
        _active.reset(before)
