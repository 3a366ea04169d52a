"""What Kubeflow Pipelines knows: experiments, pipelines, runs and schedules, by their ids."""

import uuid
from dataclasses import dataclass, field

from tests.fake_cluster.clock import Clock
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kfp_listing import page

FINISHED = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
Table = dict[str, Json]


@dataclass
class KfpState:
    """All tables, and who may use them.

    Attributes:
        multi_user: Whether there are profiles: each has its namespace, which requests must name.
        namespaces: Those that this user may use.
        token: What the client has to present as bearer.
        cookie: What it may present as cookie instead. With neither nobody is asked.
        history: The states that a run goes through, each with its seconds; the last one stays.
        has_ui: Whether the address is that of the UI server, which tells about pods, or of the API server behind it.
        pods: What each pod of a run has printed; None where it has not begun.
        events: What is in the way of a pod.
        workflows: The names of the workflows of scheduled runs, with which the names of their pods begin.
    """

    clock: Clock
    multi_user: bool = False
    namespaces: tuple[str, ...] = ("team",)
    token: str | None = None
    cookie: str | None = None
    history: tuple[tuple[str, float], ...] = (("PENDING", 5), ("RUNNING", 60), ("SUCCEEDED", 0))
    experiments: dict[str, Json] = field(default_factory=dict)
    pipelines: dict[str, Json] = field(default_factory=dict)
    versions: dict[str, Json] = field(default_factory=dict)
    runs: dict[str, Json] = field(default_factory=dict)
    recurring_runs: dict[str, Json] = field(default_factory=dict)
    has_ui: bool = True
    pods: dict[str, str | None] = field(default_factory=dict)
    events: dict[str, list[Json]] = field(default_factory=dict)
    workflows: dict[str, str] = field(default_factory=dict)
    _count: int = 0

    def new(self, table: Table, key: str, **values: object) -> Json:
        """A new row with its id and time; values that are None are left out."""
        self._count += 1
        id_ = str(uuid.UUID(int=self._count << 64, version=4))
        row = {key: id_, "created_at": self.clock.now().isoformat().replace("+00:00", "Z"), **values}
        table[id_] = {name: value for name, value in row.items() if value is not None}
        return table[id_]

    def get(self, table: Table, kind: str, _: Request, id_: str) -> Answer:
        """Answer with one row."""
        return Answer(self.existing(table, kind, id_))

    def existing(self, table: Table, kind: str, id_: str) -> Json:
        """One row, or 404."""
        if id_ not in table:
            raise ApiError(404, f"{kind} {id_} not found")
        return table[id_]

    def namespace_of(self, given: str | None) -> str:
        """The namespace of a request: required, and one of the user's, where there are profiles."""
        if not self.multi_user:
            return given or ""
        if not given:
            raise ApiError(400, "Namespace cannot be empty in multi-user mode", reason="InvalidArgument")
        if given not in self.namespaces:
            raise ApiError(403, f"User is not authorized in the namespace {given}", reason="PermissionDenied")
        return given

    def list(self, table: Table, called: str, request: Request) -> Answer:
        """Answer with the rows that the request may see and asks for."""
        namespace = request.query.get("namespace", "")
        experiment = request.query.get("experiment_id", "")
        if table is not self.pipelines and not experiment:
            namespace = self.namespace_of(namespace)
        rows = [
            row
            for row in table.values()
            if (not experiment or row.get("experiment_id") == experiment)
            and (not self.multi_user or not namespace or row.get("namespace", namespace) == namespace)
        ]
        return page(rows, request, called)

    def delete(self, table: Table, kind: str, _: Request, id_: str) -> Answer:
        """Forget one row."""
        self.existing(table, kind, id_)
        if table is self.pipelines and any(each["pipeline_id"] == id_ for each in self.versions.values()):
            raise ApiError(400, f"as it has existing pipeline versions, pipeline {id_} cannot be deleted")
        del table[id_]
        return Answer({})

    def enter(self, run: Json, state: str) -> None:
        """Have a run be in a state from now on."""
        now = self.clock.now().isoformat().replace("+00:00", "Z")
        run["state"] = state
        run.setdefault("state_history", []).append({"state": state, "update_time": now})
        if state in FINISHED:
            run["finished_at"] = now
