"""Pipelines and their versions, uploaded and found again."""

from functools import partial

from tests.fake_cluster import kfp_documents
from tests.fake_cluster.errors import ApiError, Json
from tests.fake_cluster.http import Answer, Request
from tests.fake_cluster.kfp_listing import page
from tests.fake_cluster.kfp_state import KfpState
from tests.fake_cluster.routes import Route


class Pipelines:
    """What is asked of pipelines."""

    def __init__(self, state: KfpState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """The paths below which they are."""
        return [
            ("POST", "pipelines/upload", self._upload),
            ("POST", "pipelines/upload_version", self._upload_version),
            ("GET", "pipelines", partial(self._state.list, self._state.pipelines, "pipelines")),
            ("GET", "pipelines/names/{}", self._pipeline_by_name),
            ("GET", "pipelines/{}", partial(self._state.get, self._state.pipelines, "Pipeline")),
            ("DELETE", "pipelines/{}", partial(self._state.delete, self._state.pipelines, "Pipeline")),
            ("GET", "pipelines/{}/versions", self._list_versions),
            ("GET", "pipelines/{}/versions/{}", self._get_version),
            ("DELETE", "pipelines/{}/versions/{}", self._delete_version),
        ]

    def _upload(self, request: Request) -> Answer:
        pipeline = kfp_documents.uploaded(request)
        name = request.query.get("name") or pipeline["pipeline_spec"]["pipelineInfo"]["name"]
        if any(row["name"] == name for row in self._state.pipelines.values()):
            raise ApiError(409, f"Already exist error: The name {name} already exist. Please specify a new name")
        row = self._state.new(
            self._state.pipelines,
            "pipeline_id",
            name=name,
            display_name=request.query.get("display_name") or name,
            description=request.query.get("description"),
            namespace=request.query.get("namespace"),
        )
        self._add_version(row["pipeline_id"], name, request, pipeline)
        return Answer(row)

    def _upload_version(self, request: Request) -> Answer:
        parent = self._state.existing(self._state.pipelines, "Pipeline", request.query.get("pipelineid", ""))[
            "pipeline_id"
        ]
        name = request.query.get("name", "")
        return Answer(self._add_version(parent, name, request, kfp_documents.uploaded(request)))

    def _add_version(self, pipeline_id: str, name: str, request: Request, pipeline: Json) -> Json:
        rows = self._state.versions.values()
        if not name or any((row["pipeline_id"], row["name"]) == (pipeline_id, name) for row in rows):
            raise ApiError(409, f"Already exist error: The name {name} already exist. Please specify a new name")
        return self._state.new(
            self._state.versions,
            "pipeline_version_id",
            pipeline_id=pipeline_id,
            name=name,
            display_name=name,
            description=request.query.get("description"),
            pipeline_spec=pipeline,
        )

    def _pipeline_by_name(self, _: Request, name: str) -> Answer:
        for row in self._state.pipelines.values():
            if row["name"] == name:
                return Answer(row)
        raise ApiError(404, f"Pipeline {name} not found")

    def _list_versions(self, request: Request, pipeline_id: str) -> Answer:
        self._state.existing(self._state.pipelines, "Pipeline", pipeline_id)
        rows = [row for row in self._state.versions.values() if row["pipeline_id"] == pipeline_id]
        return page(rows, request, "pipeline_versions")

    def _get_version(self, _: Request, __: str, id_: str) -> Answer:
        return Answer(self._state.existing(self._state.versions, "PipelineVersion", id_))

    def _delete_version(self, request: Request, _: str, id_: str) -> Answer:
        return self._state.delete(self._state.versions, "PipelineVersion", request, id_)
