"""A TrainJob in the cluster: adopted where an earlier attempt of the step has left it, else submitted anew."""

from collections.abc import Callable
from dataclasses import dataclass

from kubernetes import client

from components.cluster import names
from components.cluster.clock import Clock
from components.cluster.trainjob.manifest import Json
from components.cluster.trainjob.objects import Objects
from components.cluster.trainjob.patience import Patience
from components.cluster.trainjob.state import condition
from components.shared.errors import PipelineError, RetryableError
from components.shared.progress import say

_GONE_S = 300.0
"""Beyond the time that pods have to end."""
_POLL_S = 2.0
_CONFLICT = 409


class LingeringError(RetryableError):
    """What was deleted does not go away."""


@dataclass(frozen=True)
class Submission:
    """How a job comes into the cluster and out of it."""

    objects: Objects
    clock: Clock
    stage: str
    grace_s: float
    """Time that the job's pods have to end."""

    def submit(self, manifest: Json, write: Callable[[], None]) -> Json:
        """Return the job as it is in the cluster; `write` is called before one is made, to lay out what its pods read.

        A job of this stage that is another one, or has ended, is removed first. So is one of another run that does the
        same work: this step holds the folder of that work, so the step that waited for it is gone.

        Raises:
            PipelineError: The cluster refuses the job.
            UnansweredError: It does not answer.
            LingeringError: An old job does not go away.
        """
        for found in self._jobs(manifest, names.RUN_ID, names.STAGE):
            if _is_same(found, manifest) and not _is_over(found):
                return self._adopt(found, manifest)
            self.remove(found["metadata"]["name"])
        for found in self._jobs(manifest, names.WORK):
            name = found["metadata"]["name"]
            say(self.stage, f"{name} of another run does the same work; it is removed, and its checkpoints are used")
            self.remove(name)
        self.await_gone(manifest["metadata"]["name"])
        write()
        return self._create(manifest)

    def _jobs(self, manifest: Json, *labels: str) -> list[Json]:
        """The jobs in the cluster that have these labels as the manifest has them."""
        wanted = {label: manifest["metadata"]["labels"][label] for label in labels}
        return self._patience.ask("list training jobs", lambda: self.objects.jobs(wanted))

    def remove(self, name: str) -> None:
        """Have a job deleted; LingeringError where it is not gone with all its pods in time."""
        self._patience.ask(f"delete the training job {name}", lambda: self.objects.delete(name))
        self.await_gone(name)

    def await_gone(self, name: str) -> None:
        """Wait until neither a job nor a pod of it is left: two would write the same checkpoints."""
        deadline = self.clock.monotonic() + self.grace_s + _GONE_S
        while self._is_there(name):
            if self.clock.monotonic() > deadline:
                raise LingeringError(f"{name}: its pods are not gone {self.grace_s + _GONE_S:g} s after it was deleted")
            self.clock.sleep(_POLL_S)

    def _is_there(self, name: str) -> bool:
        job = self._patience.ask(f"tell of the training job {name}", lambda: self.objects.job(name))
        return job is not None or bool(self._patience.ask("list pods", lambda: self.objects.pods(name)))

    def _adopt(self, found: Json, manifest: Json) -> Json:
        """Take over a job: its heart beats for this step now, and it goes away with this step's run."""
        name, metadata = found["metadata"]["name"], manifest["metadata"]
        say(self.stage, f"{name} is there already and goes on")
        changes = beat(metadata["annotations"][names.HEARTBEAT])
        if "ownerReferences" in metadata:
            changes["ownerReferences"] = metadata["ownerReferences"]
        self._patience.ask(f"adopt the training job {name}", lambda: self.objects.change(found, changes))
        return found

    def _create(self, manifest: Json) -> Json:
        name = manifest["metadata"]["name"]
        self._patience.ask(f"create the training job {name}", lambda: self._create_once(manifest))
        made = self._patience.ask(f"tell of the training job {name}", lambda: self.objects.job(name))
        if made is None:
            raise RetryableError(f"{name}: somebody has deleted it as soon as it was submitted")
        if not _is_same(made, manifest):
            raise PipelineError(f"{name}: there is a training job of this name that is not of this run; delete it")
        say(self.stage, f"submitted {name}")
        return made

    def _create_once(self, manifest: Json) -> None:
        try:
            self.objects.create(manifest)
        except client.ApiException as error:
            # A call whose answer was lost has had its effect all the same.
            if error.status != _CONFLICT:
                raise

    @property
    def _patience(self) -> Patience:
        return Patience(self.clock)


def beat(now: str | None) -> Json:
    """Return the change of a job's metadata by which its heart beats; with None it has none any more."""
    return {"annotations": {names.HEARTBEAT: now}}


def _is_same(found: Json, manifest: Json) -> bool:
    """Whether a job is what would be submitted."""
    annotations = found["metadata"].get("annotations") or {}
    is_named = found["metadata"]["name"] == manifest["metadata"]["name"]
    wanted = manifest["metadata"]["annotations"][names.SPEC_DIGEST]
    return bool(is_named and annotations.get(names.SPEC_DIGEST) == wanted)


def _is_over(job: Json) -> bool:
    """Whether a job has ended, or is about to go."""
    ended = any(condition(job, kind)["status"] == "True" for kind in ("Complete", "Failed"))
    return ended or "deletionTimestamp" in job["metadata"]
