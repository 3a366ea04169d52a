"""What the controllers of Trainer and JobSet keep of one TrainJob: its JobSet, jobs and pods, and its status."""

from tests.fake_cluster.errors import Json
from tests.fake_cluster.kinds import JOB_SETS, JOBS, TRAIN_JOBS
from tests.fake_cluster.pod_templates import pod_templates
from tests.fake_cluster.pods import Pods, reference_to
from tests.fake_cluster.store import Store, rfc3339


class Children:
    """The objects that belong to a TrainJob, and what its status says of them."""

    def __init__(self, store: Store, pods: Pods, job: Json, runtime: Json) -> None:
        self._store, self._pods, self._runtime = store, pods, runtime
        self._namespace, self._name = job["metadata"]["namespace"], job["metadata"]["name"]
        self._uid = job["metadata"]["uid"]

    @property
    def max_restarts(self) -> int:
        """How often JobSet starts all pods anew."""
        policy = self._runtime["spec"]["template"]["spec"].get("failurePolicy", {})
        found: int = policy.get("maxRestarts", 0)
        return found

    def job(self) -> Json | None:
        """The TrainJob as it is now; None once it is deleted."""
        job = self._store.get(TRAIN_JOBS, self._namespace, self._name)
        return job if job is not None and job["metadata"]["uid"] == self._uid else None

    def pods(self, job: Json, attempt: int) -> list[Json]:
        """The job's pods, made if there are none."""
        if not self._pods.of(job):
            job_set = self._job_set(job)
            for template in pod_templates(job, self._runtime):
                owner = self._child_job(job_set, f"{self._name}-{template.job}-{template.replica}")
                self._pods.create(job, template, owner, attempt)
            self.report(active=1)
        return self._pods.of(job)

    def condition(self, type_: str, status: str, reason: str, message: str) -> None:
        """Write a condition into the TrainJob's status."""
        job = self.job()
        assert job is not None
        kept = [each for each in job.get("status", {}).get("conditions", []) if each["type"] != type_]
        moment = rfc3339(self._store.clock.now())
        made = {"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}
        conditions = {**job.get("status", {}), "conditions": [*kept, made]}
        self._store.patch(TRAIN_JOBS, self._namespace, self._name, status=conditions)

    def report(self, **counts: int) -> None:
        """Write how the child jobs are, into the JobSet's status and the TrainJob's."""
        job = self.job()
        assert job is not None
        zero = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
        jobs = [
            {
                "name": each["name"],
                **zero,
                **{count: number * each.get("replicas", 1) for count, number in counts.items()},
            }
            for each in self._runtime["spec"]["template"]["spec"]["replicatedJobs"]
        ]
        status = {**job.get("status", {}), "jobsStatus": jobs}
        self._store.patch(JOB_SETS, self._namespace, self._name, status={"replicatedJobsStatus": jobs})
        self._store.patch(TRAIN_JOBS, self._namespace, self._name, status=status)

    def _job_set(self, job: Json) -> Json:
        existing = self._store.get(JOB_SETS, self._namespace, self._name)
        return existing or self._child(JOB_SETS.api_version, "JobSet", self._name, job)

    def _child_job(self, job_set: Json, name: str) -> Json:
        return self._store.get(JOBS, self._namespace, name) or self._child("batch/v1", "Job", name, job_set)

    def _child(self, api_version: str, kind: str, name: str, owner: Json) -> Json:
        metadata = {"name": name, "namespace": self._namespace, "ownerReferences": [reference_to(owner)]}
        return self._store.create({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": {}})
