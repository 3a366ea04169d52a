"""What the steps of a run have to be allowed to do in the cluster, asked of the cluster itself."""

from dataclasses import dataclass

from kubernetes import client

_TRAINER = "trainer.kubeflow.org"


@dataclass(frozen=True)
class Permission:
    """One kind of request."""

    verb: str
    resource: str
    """With its subresource: `pods/log`."""
    group: str = ""

    def __str__(self) -> str:
        """In the words of a Role."""
        return f"{self.verb} {self.resource}" + (f" ({self.group})" if self.group else "")


LAUNCH = (
    *(Permission(verb, "trainjobs", _TRAINER) for verb in ("create", "delete", "get", "list", "patch")),
    Permission("list", "pods"),
    Permission("get", "pods/log"),
    Permission("list", "events"),
)
"""What launching, watching and removing a training job takes."""


def missing(api: client.ApiClient, namespace: str) -> list[str]:
    """Return a line with what this process is not allowed to do in a namespace, if there is anything."""
    lacking = [str(each) for each in LAUNCH if not _allowed(api, namespace, each)]
    if not lacking:
        return []
    return [f"not allowed in namespace {namespace}: {', '.join(lacking)}; bind the Role grpo-pipeline-launcher (k8s/)"]


def _allowed(api: client.ApiClient, namespace: str, permission: Permission) -> bool:
    plural, _, subresource = permission.resource.partition("/")
    attributes = client.V1ResourceAttributes(
        verb=permission.verb,
        group=permission.group,
        resource=plural,
        subresource=subresource or None,
        namespace=namespace,
    )
    review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes))
    answer = client.AuthorizationV1Api(api).create_self_subject_access_review(review)
    return bool(answer.status.allowed)
