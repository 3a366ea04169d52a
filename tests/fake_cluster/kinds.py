"""The kinds of objects the server knows, and by which paths."""

from dataclasses import dataclass

_NAMES = ("metadata.name", "metadata.namespace")
_POD_FIELDS = ("spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase", "status.podIP")
_EVENT_FIELDS = (
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
)


@dataclass(frozen=True)
class Kind:
    """One kind of objects."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    name: str
    namespaced: bool = True
    custom: bool = False
    """Defined by a CustomResourceDefinition: no strategic merge patch, no fields to select by."""
    status: bool = False
    """Has the status subresource: a plain write cannot change the status."""
    fields: tuple[str, ...] = ()
    """What field selectors may name, besides name and namespace."""

    @property
    def api_version(self) -> str:
        """As it stands in an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """As errors name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def qualified(self) -> str:
        """As errors about an invalid object name it."""
        return f"{self.name}.{self.group}" if self.group else self.name

    @property
    def selectable(self) -> tuple[str, ...]:
        """What field selectors may name."""
        return (*_NAMES, *self.fields)


_TRAINER, _KUEUE = "trainer.kubeflow.org", "kueue.x-k8s.io"
TRAIN_JOBS = Kind(_TRAINER, "v1alpha1", "trainjobs", "TrainJob", custom=True, status=True)
TRAINING_RUNTIMES = Kind(_TRAINER, "v1alpha1", "trainingruntimes", "TrainingRuntime", custom=True)
CLUSTER_TRAINING_RUNTIMES = Kind(
    _TRAINER, "v1alpha1", "clustertrainingruntimes", "ClusterTrainingRuntime", namespaced=False, custom=True
)
LOCAL_QUEUES = Kind(_KUEUE, "v1beta1", "localqueues", "LocalQueue", custom=True, status=True)
JOB_SETS = Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", custom=True, status=True)
WORKFLOWS = Kind("argoproj.io", "v1alpha1", "workflows", "Workflow", custom=True)
PODS = Kind("", "v1", "pods", "Pod", status=True, fields=_POD_FIELDS)
EVENTS = Kind("", "v1", "events", "Event", fields=_EVENT_FIELDS)
NAMESPACES = Kind("", "v1", "namespaces", "Namespace", namespaced=False, fields=("status.phase",))
SECRETS = Kind("", "v1", "secrets", "Secret", fields=("type",))
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
CLAIMS = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", status=True)
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount")
NODES = Kind("", "v1", "nodes", "Node", namespaced=False, fields=("spec.unschedulable",))
JOBS = Kind("batch", "v1", "jobs", "Job", status=True, fields=("status.successful",))
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
STORAGE_CLASSES = Kind("storage.k8s.io", "v1", "storageclasses", "StorageClass", namespaced=False)
DEFINITIONS = Kind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False, status=True
)

KINDS = (
    TRAIN_JOBS,
    TRAINING_RUNTIMES,
    CLUSTER_TRAINING_RUNTIMES,
    LOCAL_QUEUES,
    JOB_SETS,
    WORKFLOWS,
    PODS,
    EVENTS,
    NAMESPACES,
    SECRETS,
    CONFIG_MAPS,
    CLAIMS,
    SERVICE_ACCOUNTS,
    NODES,
    JOBS,
    LEASES,
    STORAGE_CLASSES,
    DEFINITIONS,
)
_BY_PATH = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}
_BY_NAME = {(kind.api_version, kind.name): kind for kind in KINDS}


def kind_at(group: str, version: str, plural: str) -> Kind | None:
    """The kind that a path names."""
    return _BY_PATH.get((group, version, plural))


def kind_of(api_version: str, name: str) -> Kind:
    """The kind of an object."""
    return _BY_NAME[api_version, name]
