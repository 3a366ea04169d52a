"""What containers have printed, and how clients read it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.errors import ApiError, Json, not_found
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kinds import PODS
from tests.fake_cluster.store import Store

_FOREVER = float("inf")


@dataclass
class Output:
    """What one start of a container has printed."""

    lines: list[tuple[datetime, str]] = field(default_factory=list)
    is_over: bool = False


class Logs:
    """The output of all containers, by the pod's uid and the container's name; the last one of each runs."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outputs: dict[tuple[str, str], list[Output]] = {}

    def begin(self, pod: Json, container: str) -> None:
        """A container starts, for the first time or again."""
        self._outputs.setdefault((pod["metadata"]["uid"], container), []).append(Output())

    def write(self, pod: Json, container: str, *lines: str) -> None:
        """A container prints."""
        for line in lines:
            self._outputs[pod["metadata"]["uid"], container][-1].lines.append((self._clock.now(), line))
        self._clock.changed.notify_all()

    def end(self, pod: Json, container: str) -> None:
        """A container has ended; who follows its log is done."""
        for output in self._outputs.get((pod["metadata"]["uid"], container), []):
            output.is_over = True
        self._clock.changed.notify_all()

    def output(self, pod: Json, container: str, *, previous: bool) -> Output | None:
        """What the container's last start has printed, or the one before."""
        outputs = self._outputs.get((pod["metadata"]["uid"], container), [])
        wanted = 2 if previous else 1
        return outputs[-wanted] if len(outputs) >= wanted else None


class LogReader:
    """Answers GET .../pods/NAME/log."""

    def __init__(self, store: Store, logs: Logs) -> None:
        self._store, self._logs = store, logs

    def read(self, namespace: str, name: str, request: Request) -> Answer:
        """The log as far as it is wanted, or followed until the container ends."""
        pod = self._store.get(PODS, namespace, name)
        if pod is None:
            raise not_found("pods", name)
        container = _container(pod, request.query.get("container", ""))
        previous = request.flag("previous")
        output = self._logs.output(pod, container, previous=previous)
        if output is None:
            raise ApiError(400, _why_none(pod, container, previous=previous))
        if not request.flag("follow"):
            output = Output(list(output.lines), is_over=True)
        stamp = request.flag("timestamps")
        chunks = self._chunks(output, _first(output, request, self._store.clock.now()), stamp, namespace, name)
        if "limitBytes" in request.query:
            chunks = _limited(chunks, int(request.query["limitBytes"]))
        return Answer(stream=chunks, headers={"Content-Type": "text/plain"})

    def _chunks(self, output: Output, first: int, stamp: bool, namespace: str, name: str) -> Iterator[bytes]:
        clock = self._store.clock
        while True:
            with clock.changed:

                def is_over() -> bool:
                    return output.is_over or self._store.get(PODS, namespace, name) is None

                clock.wait_for(lambda: len(output.lines) > first or is_over(), _FOREVER)  # noqa: B023
                lines = output.lines[first:]
                first += len(lines)
                over = is_over() or clock.is_closed
            yield from (_text(moment, line, stamp) for moment, line in lines)
            if over:
                return


def _container(pod: Json, wanted: str) -> str:
    names: list[str] = [each["name"] for each in pod["spec"]["containers"]]
    name = pod["metadata"]["name"]
    if not wanted and len(names) > 1:
        raise ApiError(400, f"a container name must be specified for pod {name}, choose one of: [{' '.join(names)}]")
    if wanted and wanted not in names:
        raise ApiError(400, f"container {wanted} is not valid for pod {name}")
    return wanted or names[0]


def _why_none(pod: Json, container: str, *, previous: bool) -> str:
    name = pod["metadata"]["name"]
    if not pod["spec"].get("nodeName"):
        return f"pod {name} does not have a host assigned"
    if previous:
        return f'previous terminated container "{container}" in pod "{name}" not found'
    states = {each["name"]: each["state"] for each in pod.get("status", {}).get("containerStatuses", [])}
    reason = states.get(container, {}).get("waiting", {}).get("reason", "ContainerCreating")
    how = "trying and failing to pull image" if reason in ("ErrImagePull", "ImagePullBackOff") else reason
    return f'container "{container}" in pod "{name}" is waiting to start: {how}'


def _first(output: Output, request: Request, now: datetime) -> int:
    """The number of the first line wanted."""
    first, query = 0, request.query
    if "sinceTime" in query and "sinceSeconds" in query:
        raise ApiError(422, "at most one of `sinceTime` or `sinceSeconds` may be specified")
    since = None
    if "sinceTime" in query:
        since = datetime.fromisoformat(query["sinceTime"])
    if "sinceSeconds" in query:
        if int(query["sinceSeconds"]) < 1:
            raise ApiError(422, "sinceSeconds: Invalid value: must be greater than 0")
        since = now - timedelta(seconds=int(query["sinceSeconds"]))
    if since is not None:
        first = sum(moment < since for moment, _ in output.lines)
    if "tailLines" in query:
        first = max(first, len(output.lines) - int(query["tailLines"]))
    return first


def _text(moment: datetime, line: str, stamp: bool) -> bytes:
    prefix = moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ") if stamp else ""
    return f"{prefix}{line}\n".encode()


def _limited(chunks: Iterator[bytes], left: int) -> Iterator[bytes]:
    for chunk in chunks:
        if left <= 0:
            return
        yield chunk[:left]
        left -= len(chunk)
