"""What the webhooks of Kubeflow Trainer and JobSet accept as a runtime, beyond the types of its fields."""

from collections.abc import Iterator

from tests.fake_cluster.errors import ApiError, Json

_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_CONTAINERS = {
    "trainer": "node",
    "model-initializer": "model-initializer",
    "dataset-initializer": "dataset-initializer",
}


def check(document: Json) -> None:
    """Refuse a runtime from which no job could be made.

    Raises:
        ApiError: 403.
    """
    denied = list(_problems(document["spec"]["template"]["spec"].get("replicatedJobs", [])))
    if denied:
        webhook = f"validator.{document['kind'].lower()}.trainer.kubeflow.org"
        raise ApiError(403, f'admission webhook "{webhook}" denied the request: {", ".join(denied)}')


def _problems(jobs: list[Json]) -> Iterator[str]:
    earlier: set[str] = set()
    for number, job in enumerate(jobs):
        path = f"spec.template.spec.replicatedJobs[{number}]"
        step = job["template"].get("metadata", {}).get("labels", {}).get(_ANCESTOR)
        pod = job["template"]["spec"]["template"]["spec"]
        if step in _CONTAINERS:
            if job.get("replicas", 1) != 1:
                yield f"{path}.replicas: Invalid value: {job['replicas']}: always must be 1"
            if _CONTAINERS[step] not in {each["name"] for each in pod["containers"]}:
                yield f"{path}...containers: must contain the required container for the ancestor: {step}"
        if pod.get("priorityClassName") and step != "trainer":
            yield f"{path}...priorityClassName: must not be set on this replicatedJob"
        for needed in job.get("dependsOn", []):
            if needed["name"] not in earlier:
                yield f"{path}.dependsOn: {needed['name']} must be a replicatedJob before this one"
        earlier.add(job["name"])
