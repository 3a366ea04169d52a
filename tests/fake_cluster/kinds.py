"""The kinds of objects that the server knows."""

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of objects."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Group and version as an object states them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """Plural and group, by which errors name the kind."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_TRAINER = ("trainer.kubeflow.org", "v1alpha1")
TRAIN_JOBS = Kind(*_TRAINER, "trainjobs", "TrainJob")
TRAINING_RUNTIMES = Kind(*_TRAINER, "trainingruntimes", "TrainingRuntime")
JOB_SETS = Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
LOCAL_QUEUES = Kind("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue")
WORKLOADS = Kind("kueue.x-k8s.io", "v1beta2", "workloads", "Workload")
POSITIONS = Kind("visibility.kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue")
WORKFLOWS = Kind("argoproj.io", "v1alpha1", "workflows", "Workflow")
PODS = Kind("", "v1", "pods", "Pod")
EVENTS = Kind("", "v1", "events", "Event")
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
SECRETS = Kind("", "v1", "secrets", "Secret")
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")

KINDS = tuple(value for value in list(globals().values()) if isinstance(value, Kind))


def kind_of(api_version: str, name: str) -> Kind:
    """Return the kind of an object."""
    return next(kind for kind in KINDS if (kind.api_version, kind.name) == (api_version, name))
