"""What happens to a training job: a tuple of steps, one after another. `seconds=None` lasts for ever."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Queued:
    """Kueue keeps the job suspended, for the reason in its Workload; at the end it is admitted."""

    seconds: float | None = 30
    message: str = (
        "couldn't assign flavors to pod set node: insufficient unused quota for cpu in flavor x, 4 more needed"
    )


@dataclass(frozen=True)
class Unschedulable:
    """The pods are Pending, and the scheduler says why."""

    seconds: float | None = 60
    message: str = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available."


@dataclass(frozen=True)
class PullBackOff:
    """The pods have nodes, but their image cannot be pulled."""

    seconds: float | None = 60
    message: str = "rpc error: code = NotFound desc = failed to pull and unpack image: not found"


@dataclass(frozen=True)
class Running:
    """All containers run; the first pod of `node` prints the lines, evenly over the time."""

    seconds: float | None = 60
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preempted:
    """Kueue suspends the running job: its pods and their logs are gone. At the end it is admitted again."""

    seconds: float | None = 60


@dataclass(frozen=True)
class NodeLost:
    """The node of one pod is lost, and JobSet starts all pods anew; fails where the runtime allows no restart."""

    rank: int = 0


@dataclass(frozen=True)
class Failed:
    """A container ends with this exit code, and the job has failed."""

    exit_code: int = 1
    reason: str = "Error"
    lines: tuple[str, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class Complete:
    """Every container ends with exit code 0."""


@dataclass(frozen=True)
class Do:
    """The test does something at this moment, such as writing what the ranks would have written."""

    action: Callable[[], None]


Step = Queued | Unschedulable | PullBackOff | Running | Preempted | NodeLost | Failed | Complete | Do
Script = tuple[Step, ...]
OUT_OF_MEMORY = Failed(exit_code=137, reason="OOMKilled")
