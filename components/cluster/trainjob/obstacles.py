"""Why pods do not start."""

from collections.abc import Sequence
from typing import Any

from components.cluster.clock import Clock
from components.cluster.trainjob.state import condition, states_of
from components.shared.errors import PipelineError

Json = dict[str, Any]

_HOPELESS_AFTER_S = {
    "InvalidImageName": 0.0,
    "ErrImageNeverPull": 0.0,
    "CreateContainerConfigError": 60.0,
    "CreateContainerError": 120.0,
    "RunContainerError": 120.0,
    "ErrImagePull": 300.0,
    "ImagePullBackOff": 300.0,
}
"""Why a container waits, and how long that may last: a registry may be busy, a secret may come a little later."""
_HINTS = {
    "CreateContainerConfigError": "; does each of cluster.secrets have its keys?",
    "ErrImagePull": "; is cluster.image right, and may this namespace pull it?",
    "ImagePullBackOff": "; is cluster.image right, and may this namespace pull it?",
}


class Obstacles:
    """Watches what keeps pods from starting, and for how long."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def refuse_hopeless(self, pods: Sequence[Json]) -> None:
        """PipelineError where a container waits for what does not come by waiting."""
        found = [(pod, state) for pod in pods for state in states_of(pod, "waiting")]
        there = {"pull" if "Image" in state.get("reason", "") else state.get("reason", "") for _, state in found}
        self._since = {reason: self._since.get(reason, self._clock.monotonic()) for reason in there}
        for pod, state in found:
            reason = state.get("reason", "")
            since = self._since["pull" if "Image" in reason else reason]
            if reason in _HOPELESS_AFTER_S and self._clock.monotonic() - since >= _HOPELESS_AFTER_S[reason]:
                said = state.get("message", "no message")
                raise PipelineError(f"{pod['metadata']['name']}: {reason}: {said}{_HINTS.get(reason, '')}")


def obstacle(pods: Sequence[Json], events: Sequence[Json]) -> str:
    """Return in a line why pods do not run, as far as they or the newest warning among their events say."""
    for pod in pods:
        for state in states_of(pod, "waiting"):
            if state.get("message"):
                return f"{pod['metadata']['name']}: {state['reason']}: {state['message']}"
        scheduled = condition(pod, "PodScheduled")
        if scheduled["status"] == "False":
            return f"{pod['metadata']['name']}: {scheduled['reason']}: {scheduled['message']}"
    warnings = [f"{each['reason']}: {each['message']}" for each in events if each.get("type") == "Warning"]
    return warnings[-1] if warnings else "no reason is given"
