"""The scripted cluster behind the server: what is installed in it, and what becomes of the TrainJobs made in it."""

import re
from typing import Any

from tests.fake_cluster.errors import Json
from tests.fake_cluster.kinds import (
    DEFINITIONS,
    KINDS,
    PODS,
    TRAIN_JOBS,
    TRAINING_RUNTIMES,
    WORKFLOWS,
    Kind,
    kind_of,
)
from tests.fake_cluster.logs import Logs
from tests.fake_cluster.pods import Pods
from tests.fake_cluster.processes import Processes
from tests.fake_cluster.script import GOES_WELL, Script
from tests.fake_cluster.store import Change, Store, rfc3339
from tests.fake_cluster.training_run import TrainingRun


class Cluster:
    """What stands behind the API, for the test to arrange and to look at.

    At the start there are the namespaces `default` and the test's own, and the definitions of all kinds. All methods
    take the lock that guards time and objects.
    """

    def __init__(self, store: Store, logs: Logs, namespace: str) -> None:
        self._store, self._namespace = store, namespace
        self._logs = logs
        self._pods = Pods(store, logs)
        self._processes = Processes(store, logs)
        self._scripts: list[tuple[str, Script]] = [("", GOES_WELL)]
        self._runs: dict[str, TrainingRun] = {}
        for name in {"default", namespace}:
            self.add(_document("v1", "Namespace", name, status={"phase": "Active"}))
        for kind in KINDS:
            if kind.custom:
                self.define(kind)
        store.listen(self._see)

    def define(self, kind: Kind) -> None:
        """Install the definition of a custom kind."""
        names = {"plural": kind.plural, "kind": kind.name}
        scope = "Namespaced" if kind.namespaced else "Cluster"
        version = {"name": kind.version, "served": True, "storage": True}
        spec = {"group": kind.group, "names": names, "scope": scope, "versions": [version]}
        self.add(_document("apiextensions.k8s.io/v1", "CustomResourceDefinition", kind.resource, spec=spec))

    def undefine(self, kind: Kind) -> None:
        """Remove the definition of a custom kind: its paths answer 404 as if it had never been installed."""
        with self._store.clock.changed:
            self._store.remove((DEFINITIONS, "", kind.resource))

    def add(self, *documents: Json) -> list[Json]:
        """Create objects as they are, past all rules; those of namespaced kinds in the test's namespace if in none."""
        with self._store.clock.changed:
            return [self._store.create(self._placed(each)) for each in documents]

    def add_runtime(
        self, name: str = "grpo-torch", *, max_restarts: int = 0, jobs: tuple[str, ...] = ("node",)
    ) -> None:
        """Create a TrainingRuntime with one container per job, named as the job."""
        self.add(runtime(name, max_restarts=max_restarts, jobs=jobs))

    def add_workflow(self, name: str) -> Json:
        """Create the workflow of a run, to which the pods of its steps belong."""
        return self.add(_document(WORKFLOWS.api_version, "Workflow", name, spec={}))[0]

    def add_pod(self, name: str, workflow: Json | None = None) -> Json:
        """Create a pod as the one that the code under test runs in, a step of the workflow if there is one."""
        spec = {"containers": [{"name": "main", "image": "light"}], "nodeName": "cpu-0"}
        document = _document("v1", "Pod", name, spec=spec, status={"phase": "Running"})
        if workflow is not None:
            owner = {key: workflow[key] for key in ("apiVersion", "kind")}
            owner |= {key: workflow["metadata"][key] for key in ("name", "uid")}
            document["metadata"]["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
        return self.add(document)[0]

    def drain(self, pod: str) -> None:
        """Have a pod be on its way out, as an eviction does: it is there until its containers have ended."""
        with self._store.clock.changed:
            found = self._store.get(PODS, self._namespace, pod)
            assert found is not None
            metadata = {**found["metadata"], "deletionTimestamp": rfc3339(self._store.clock.now())}
            self._store.replace({**found, "metadata": {**metadata, "finalizers": ["kubelet"]}})

    def print(self, pod: Json, *lines: str, container: str = "main") -> None:
        """Have a container of a pod print lines and end."""
        with self._store.clock.changed:
            self._logs.begin(pod, container)
            self._logs.write(pod, container, *lines)
            self._logs.end(pod, container)

    def play(self, *steps: Any, name: str = "") -> None:
        """Set the script of the TrainJobs to come: of all, or those whose name a regular expression finds."""
        self._scripts.insert(0, (name, steps))

    def get(self, kind: Kind, name: str) -> Json | None:
        """An object of the test's namespace, or of a kind without one."""
        with self._store.clock.changed:
            return self._store.get(kind, self._namespace if kind.namespaced else "", name)

    def all(self, kind: Kind) -> list[Json]:
        """All objects of a kind."""
        with self._store.clock.changed:
            return self._store.all(kind)

    def remove(self, kind: Kind, name: str) -> None:
        """Remove an object as if somebody had deleted it; what it owns is collected."""
        with self._store.clock.changed:
            self._store.remove((kind, self._namespace if kind.namespaced else "", name))

    def forget_history(self) -> None:
        """Make every older resource version too old: watches and continued lists get 410."""
        with self._store.clock.changed:
            self._store.compact()

    def close(self) -> None:
        """End what runs as a process."""
        self._processes.close()

    def _placed(self, document: Json) -> Json:
        kind = kind_of(document["apiVersion"], document["kind"])
        if kind.namespaced:
            document["metadata"].setdefault("namespace", self._namespace)
        return document

    def _see(self, change: Change) -> None:
        if change.kind != TRAIN_JOBS:
            return
        job = change.after
        uid = job["metadata"]["uid"]
        if change.type == "ADDED":
            name = job["metadata"]["name"]
            script = next(script for pattern, script in self._scripts if re.search(pattern, name))
            self._runs[uid] = TrainingRun(self._store, self._pods, self._processes, job, script)
            self._runs[uid].begin(job)
        elif change.type == "DELETED":
            self._runs.pop(uid).gone()
        elif change.before is not None:
            self._runs[uid].changed(change.before, job)


def runtime(name: str, *, max_restarts: int = 0, jobs: tuple[str, ...] = ("node",)) -> Json:
    """A TrainingRuntime's manifest."""
    replicated = [_replicated_job(job) for job in jobs]
    job_set: Json = {"replicatedJobs": replicated, "failurePolicy": {"maxRestarts": max_restarts}}
    spec = {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": job_set}}
    document = _document(TRAINING_RUNTIMES.api_version, "TrainingRuntime", name, spec=spec)
    document["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "torch"}
    return document


def _replicated_job(name: str) -> Json:
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"} if name == "node" else {}
    containers = [{"name": name, "image": "gpu"}]
    pod = {"spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 60, "containers": containers}}
    return {"name": name, "template": {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": pod}}}


def _document(api_version: str, kind: str, name: str, **parts: Json) -> Json:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **parts}
