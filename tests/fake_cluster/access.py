"""Who may do what: bearer tokens, and the rules of a role as its manifest has them."""

from dataclasses import dataclass, field

from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Request

FIRST_TOKEN = "token-1"


@dataclass
class Access:
    """The one user of the server.

    Attributes:
        rules: PolicyRules as in a Role; with None everything is allowed.
        cluster_rules: The same, from a ClusterRole: they hold for what has no namespace too.
        token: What the client has to present; with None nobody is asked.
    """

    user: str = "system:serviceaccount:team:pipeline-runner"
    token: str | None = FIRST_TOKEN
    rules: list[Json] | None = None
    cluster_rules: list[Json] = field(default_factory=list)
    _rotations: int = 1

    def rotate(self) -> str:
        """Make the token invalid and return the next one, as the kubelet does with the file in a pod."""
        self._rotations += 1
        self.token = f"token-{self._rotations}"
        return self.token

    def authenticate(self, request: Request) -> None:
        """Refuse a request without the valid token.

        Raises:
            ApiError: 401.
        """
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            raise ApiError(401, "Unauthorized")
        request.user = self.user

    def authorize(self, verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        """Refuse what no rule allows; a resource is named with its subresource, as in `pods/log`.

        Raises:
            ApiError: 403, in Kubernetes' words.
        """
        if self.allows(verb, group, resource, namespace, name):
            return
        plural = resource.partition("/")[0]
        qualified = f"{plural}.{group}" if group else plural
        subject = f'{qualified} "{name}"' if name else qualified
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        raise ApiError(
            403,
            f'{subject} is forbidden: User "{self.user}" cannot {verb} resource "{resource}" in API group "{group}" '
            f"{where}",
            details={"name": name, "group": group, "kind": plural},
        )

    def allows(self, verb: str, group: str, resource: str, namespace: str, name: str) -> bool:
        """Whether some rule allows it."""
        if self.rules is None:
            return True
        rules = [*self.cluster_rules, *(self.rules if namespace else [])]
        return any(_allows(rule, verb, group, resource, name) for rule in rules)


def _allows(rule: Json, verb: str, group: str, resource: str, name: str) -> bool:
    def has(field_: str, value: str) -> bool:
        return value in rule.get(field_, []) or "*" in rule.get(field_, [])

    names = rule.get("resourceNames")
    return (
        has("verbs", verb) and has("apiGroups", group) and has("resources", resource) and (not names or name in names)
    )
