"""The scripted cluster behind the server: what is installed in it, and what happens to the TrainJobs created in it."""

from tests.fake_cluster.admission import ANCESTOR_LABEL
from tests.fake_cluster.http import Json
from tests.fake_cluster.kinds import NAMESPACES, PODS, TRAIN_JOBS, TRAINING_RUNTIMES, WORKFLOWS, Kind, kind_of
from tests.fake_cluster.pods import Pods
from tests.fake_cluster.processes import Processes
from tests.fake_cluster.script import SUCCEEDS, Script, Step
from tests.fake_cluster.store import Change, Store, reference_to
from tests.fake_cluster.training import TrainingRun


class ScriptedCluster:
    """The objects behind the API, for the test to arrange and to look at.

    At the start there are the namespaces `default` and the test's own. All methods take the lock that guards time and
    objects.

    Attributes:
        uninstalled: Custom kinds whose definition is missing: their paths answer 404.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        self.store, self._namespace = store, namespace
        self.uninstalled: set[Kind] = set()
        self._pods = Pods(store)
        self.outputs = self._pods.outputs
        self._processes = Processes(store, self._pods)
        self._script: Script = SUCCEEDS
        self._runs: dict[str, TrainingRun] = {}
        for name in {"default", namespace}:
            self.add(_document(NAMESPACES, name))
        store.listen(self._follow)

    def add(self, *documents: Json) -> list[Json]:
        """Create objects as they are, past all rules; in the test's namespace where they name none."""
        with self.store.clock.changed:
            for document in documents:
                if kind_of(document["apiVersion"], document["kind"]).namespaced:
                    document["metadata"].setdefault("namespace", self._namespace)
            return [self.store.create(document) for document in documents]

    def add_runtime(
        self, name: str = "grpo-torch", *, max_restarts: int = 0, jobs: tuple[str, ...] = ("node",)
    ) -> None:
        """Create a TrainingRuntime with one container per job, named as the job."""
        self.add(runtime(name, max_restarts=max_restarts, jobs=jobs))

    def add_workflow(self, name: str) -> Json:
        """Create the workflow of a run, to which the pods of its steps belong."""
        return self.add(_document(WORKFLOWS, name))[0]

    def add_pod(self, name: str, workflow: Json | None = None) -> Json:
        """Create the pod that the code under test runs in, a step of the workflow if there is one."""
        spec = {"containers": [{"name": "main", "image": "light"}], "nodeName": "cpu-0"}
        pod = {**_document(PODS, name), "spec": spec, "status": {"phase": "Running"}}
        if workflow is not None:
            pod["metadata"]["ownerReferences"] = [reference_to(workflow)]
        return self.add(pod)[0]

    def drain(self, name: str) -> None:
        """Begin to delete a pod, as an eviction does: it exists until its containers have ended."""
        with self.store.clock.changed:
            pod = self.store.get(PODS, self._namespace, name)
            assert pod is not None
            pod["metadata"] |= {"deletionTimestamp": self.store.clock.stamp(), "finalizers": ["kubelet"]}
            self.store.replace(pod)

    def print(self, pod: Json, *lines: str, container: str = "main") -> None:
        """Have a container of a pod print lines and end."""
        with self.store.clock.changed:
            self._pods.print(pod, *lines, container=container)
            self._pods.end_logs(pod)

    def play(self, *steps: Step) -> None:
        """Set the script of the TrainJobs to come."""
        self._script = steps

    def get(self, kind: Kind, name: str) -> Json | None:
        """Return an object of the test's namespace, or of a kind without one."""
        with self.store.clock.changed:
            return self.store.get(kind, self._namespace if kind.namespaced else "", name)

    def all(self, kind: Kind) -> list[Json]:
        """Return all objects of a kind."""
        with self.store.clock.changed:
            return self.store.all(kind)

    def remove(self, kind: Kind, name: str) -> None:
        """Remove an object as if somebody had deleted it; what it owns is collected."""
        with self.store.clock.changed:
            self.store.remove((kind, self._namespace if kind.namespaced else "", name))

    def uninstall(self, kind: Kind) -> None:
        """Remove the definition of a custom kind."""
        self.uninstalled.add(kind)

    def close(self) -> None:
        """End what runs as a process."""
        self._processes.close()

    def _follow(self, change: Change) -> None:
        if change.kind != TRAIN_JOBS:
            return
        job, uid = change.after, change.after["metadata"]["uid"]
        if change.type == "ADDED":
            self._runs[uid] = TrainingRun(self.store, self._pods, self._processes, job, self._script)
            self._runs[uid].begin(job)
        elif change.type == "DELETED":
            self._runs.pop(uid).deleted()
        elif change.before is not None:
            self._runs[uid].changed(change.before, job)


def runtime(name: str, *, max_restarts: int = 0, jobs: tuple[str, ...] = ("node",)) -> Json:
    """Return a TrainingRuntime's manifest."""
    job_set: Json = {"replicatedJobs": [_replicated_job(job) for job in jobs]}
    job_set["failurePolicy"] = {"maxRestarts": max_restarts}
    spec = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": job_set}}
    document = {**_document(TRAINING_RUNTIMES, name), "spec": spec}
    document["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "torch"}
    return document


def _replicated_job(name: str) -> Json:
    step = {ANCESTOR_LABEL: "trainer"} if name == "node" else {}
    containers = [{"name": name, "image": "gpu"}]
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 60, "containers": containers}}
    return {"name": name, "template": {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": pod}}}


def _document(kind: Kind, name: str) -> Json:
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}}
