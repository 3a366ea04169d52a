"""The kinds of objects that the server knows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of objects."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    name: str
    custom: bool = False
    """Defined by a CustomResourceDefinition, which may be missing; without strategic merge patch."""
    namespaced: bool = True
    fields: tuple[str, ...] = ()
    """Fields for selectors, besides the name."""

    @property
    def api_version(self) -> str:
        """Group and version as an object states them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """Plural and group, by which errors name the kind."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified(self) -> str:
        """Kind and group, by which errors about an invalid object name it."""
        return f"{self.name}.{self.group}" if self.group else self.name


_TRAINER = ("trainer.kubeflow.org", "v1alpha1")
TRAIN_JOBS = Kind(*_TRAINER, "trainjobs", "TrainJob", custom=True)
TRAINING_RUNTIMES = Kind(*_TRAINER, "trainingruntimes", "TrainingRuntime", custom=True)
LOCAL_QUEUES = Kind("kueue.x-k8s.io", "v1beta1", "localqueues", "LocalQueue", custom=True)
JOB_SETS = Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", custom=True)
WORKFLOWS = Kind("argoproj.io", "v1alpha1", "workflows", "Workflow", custom=True)
PODS = Kind("", "v1", "pods", "Pod")
EVENTS = Kind("", "v1", "events", "Event", fields=("involvedObject.uid",))
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
SECRETS = Kind("", "v1", "secrets", "Secret")
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
JOBS = Kind("batch", "v1", "jobs", "Job")

KINDS = tuple(value for value in list(globals().values()) if isinstance(value, Kind))


def kind_at(group: str, version: str, plural: str) -> Kind:
    """Return the kind that a path names; fail the test where the fake has none."""
    for kind in KINDS:
        if (kind.group, kind.version, kind.plural) == (group, version, plural):
            return kind
    raise NotImplementedError(f"{group}/{version} {plural}")


def kind_of(api_version: str, name: str) -> Kind:
    """Return the kind of an object."""
    return next(kind for kind in KINDS if (kind.api_version, kind.name) == (api_version, name))
