"""Kubeflow Model Registry: announces each version to the catalogue in which a cluster's users look for models.

An announcement creates a model, a version and an artifact, one request each. Entries that exist already are compared
instead, so the next run completes one that was killed between two requests. Aliases of versions, and whether a version
was withdrawn, change later and are updated for all versions of a model at once.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from components.register.aliases import CANDIDATE
from components.register.registry import POLICY
from components.register.snapshot import Snapshot, Version
from components.register.storage import md5_in
from components.shared.environment import (
    CATALOGUE_CA_VARIABLE,
    CATALOGUE_TOKEN_FILE_VARIABLES,
    CATALOGUE_TOKEN_VARIABLE,
    RUN_ID_VARIABLE,
    RUN_NAME_VARIABLE,
)
from components.shared.errors import PipelineError, RetryableError
from components.shared.versioning import is_url

if TYPE_CHECKING:
    from model_registry.core import ModelRegistryAPIClient

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PORTS = {"http": 8080, "https": 443}
_LOCAL_HOST = re.compile(r"localhost|127(\.\d+){3}|::1|[^.]+|.*\.svc(\..*)?")
"""Hosts to which a token may go unencrypted: this machine, and services of the cluster."""
_CLIENT_VERSION = "v1"
"""API version in every path of the client; older servers have another one."""
_SUPPORTED = (_CLIENT_VERSION, "v1alpha3")
"""API versions of servers, in the order in which they are tried."""
_TIMEOUT_S = 60.0
_AUTHOR = "grpo-pipeline"
_DIGEST = "policy_digest"

T = TypeVar("T")
Value = bool | int | float | str


@dataclass(frozen=True)
class Entry:
    """One version as the catalogue shows it."""

    name: str
    version: str
    uri: str
    """Permanent address of the weights: a folder that KServe and vLLM can load."""
    description: str
    """A line for people: accuracies, and whether the gate was passed."""
    properties: Mapping[str, Value]
    """Values to sort and filter by, including the digest of the weights: numbers stay numbers."""
    source: Mapping[str, str]
    """Fields `model_source_*` of the Kubeflow run that registered it; empty outside Kubeflow."""


class Status(NamedTuple):
    """The part of a version that changes after its registration."""

    aliases: Sequence[str]
    withdrawn: bool


def statuses_of(snapshot: Snapshot, name: str) -> dict[str, Status]:
    """Return the status of each version of a model, by its number such as `v0.0.1`."""
    aliases = snapshot.aliases_by_version()
    active = {version.tag for version in snapshot.versions(name)}
    versions = snapshot.versions(name, withdrawn=True)
    return {each.version: Status(aliases.get(each.tag, ()), each.tag not in active) for each in versions}


class Catalogue:
    """A connection to a model registry.

    All methods raise PipelineError if the file with the token or the certificates is unreadable, or the server refuses
    the request, and RetryableError if the server cannot be reached, or has a temporary error.
    """

    def __init__(self, address: str, environment: Mapping[str, str] = os.environ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in _PORTS or not parts.hostname or parts.username:
            raise PipelineError(
                f"register.model_registry: {address} is not a valid address; use one such as "
                "http://model-registry-service.kubeflow.svc.cluster.local:8080, without credentials"
            )
        self.address = address
        self._server = f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS[parts.scheme]}"
        self._environment = environment
        if parts.scheme == "http" and not _LOCAL_HOST.fullmatch(parts.hostname) and self._token()[0]:
            raise PipelineError(
                f"register.model_registry: {address} would get this process's token unencrypted; use https://"
            )
        self._run(self._find_api_version())

    def announce(self, entry: Entry) -> bool:
        """Create model, version and artifact of an entry unless they exist; return whether one of the last two is new.

        PipelineError if the catalogue has other weights, or another address of them, under this name and version.
        """
        return self._run(_announce(self._client(), entry))

    def update(self, name: str, statuses: Mapping[str, Status]) -> int:
        """Update states (archived if withdrawn) and aliases of announced versions; return how many differed."""
        return self._run(_update(self._client(), name, statuses))

    def missing(self, name: str, numbers: Iterable[str]) -> list[str]:
        """Return those of a model's version numbers, such as `v0.0.1`, that were not announced, or not completely."""
        return self._run(_missing(self._client(), name, numbers))

    async def _find_api_version(self) -> None:
        """Set the first supported API version that the server answers to."""
        from mr_openapi.exceptions import NotFoundException

        for version in _SUPPORTED:
            self._api_version = version
            async with self._client().get_client() as api:
                try:
                    await api.get_registered_models(page_size="1")
                    return
                except NotFoundException:
                    continue
        raise PipelineError(
            f"{self._server}: not a model registry of a supported release; its API has none of the versions "
            f"{', '.join(_SUPPORTED)}"
        )

    def _client(self) -> "ModelRegistryAPIClient":
        """Return a client for the server's version of the API, with the current token."""
        from model_registry.core import ModelRegistryAPIClient
        from mr_openapi import Configuration

        api_version = self._api_version

        class Client(ModelRegistryAPIClient):  # type: ignore[misc]
            """The original client, whose requests go to the server's API version."""

            @asynccontextmanager
            async def get_client(self) -> AsyncIterator[Any]:
                async with super().get_client() as api:
                    serialize = api.api_client.param_serialize

                    def with_version(*, resource_path: str, **options: Any) -> Any:
                        path = resource_path.replace(f"/{_CLIENT_VERSION}/", f"/{api_version}/", 1)
                        return serialize(resource_path=path, **options)

                    api.api_client.param_serialize = with_version
                    yield api

        ca_file = self._environment.get(CATALOGUE_CA_VARIABLE)
        certificates = str(_readable(ca_file, "certificates")) if ca_file else None
        return Client(Configuration(host=self._server, access_token=self._token()[0], ssl_ca_cert=certificates))

    def _token(self) -> tuple[str | None, str]:
        """Return the token, None without one, and where it is from; a file is read each time, because it is renewed."""
        own_file, kubeflow_file = (self._environment.get(name) for name in CATALOGUE_TOKEN_FILE_VARIABLES)
        token = self._environment.get(CATALOGUE_TOKEN_VARIABLE)
        if token and not own_file:
            return token, f"this one is from {CATALOGUE_TOKEN_VARIABLE}"
        pod_file = _SERVICE_ACCOUNT / "token"
        file = own_file or kubeflow_file or (pod_file if pod_file.is_file() else None)
        if file:
            return _readable(file, "token").read_text("utf-8").strip(), f"this one is from {file}"
        return None, f"there is none; set {CATALOGUE_TOKEN_FILE_VARIABLES[0]} or {CATALOGUE_TOKEN_VARIABLE}"

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of requests, run within the time limit; the client's errors become errors of one line."""
        import aiohttp
        from mr_openapi.exceptions import ApiException

        try:
            return asyncio.run(asyncio.wait_for(work, _TIMEOUT_S))
        except ApiException as error:
            if error.status == 401:
                source = self._token()[1]
                raise PipelineError(f"{self._server}: the model registry rejects the token; {source}") from None
            reason = " ".join(str(error.body or error.reason).split())[:200]
            kind = RetryableError if error.status == 429 or (error.status or 0) >= 500 else PipelineError
            raise kind(f"{self._server}: the model registry answers {error.status} ({reason})") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_TIMEOUT_S:.0f} s"
            raise RetryableError(f"{self._server}: cannot reach the model registry ({reason})") from None


def _readable(path: str | Path, content: str) -> Path:
    """Return the path of a file; PipelineError, which names its `content`, unless the file can be read."""
    if not os.access(path, os.R_OK):
        raise PipelineError(f"{path}: no readable file with the {content} of the model registry")
    return Path(path)


def incomplete_steps(snapshot: Snapshot, name: str, address: str | None) -> Iterator[str]:
    """Yield a line for each step that registrations of a model have not completed.

    With an `address`, these include missing announcements to the catalogue there. Errors are those of `Catalogue`.
    """
    versions = snapshot.versions(name)
    candidates = {each.commit for each in snapshot.assignments(name, CANDIDATE)}
    if versions and versions[-1].commit not in candidates:
        yield f"{versions[-1].tag} never became the candidate"
    if address:
        for version in unannounced(snapshot, name, Catalogue(address)):
            yield f"{version.tag} is not announced to {address}"


def unannounced(snapshot: Snapshot, name: str, catalogue: Catalogue) -> list[Version]:
    """Return the versions of a model that were to be announced to a catalogue, but are not completely in it."""
    versions = snapshot.versions(name)
    expected = [
        version
        for version, registration in zip(versions, snapshot.registrations(versions), strict=True)
        if registration.get("model_registry") == catalogue.address
    ]
    missing = catalogue.missing(name, [version.version for version in expected])
    return [version for version in expected if version.version in missing]


def require_url(url: str) -> None:
    """Raise PipelineError if the storage of the weights is a folder: other machines cannot reach it."""
    if not is_url(url) or url.startswith("file:"):
        raise PipelineError(
            f"register.storage: the weights are in the folder {url}, which other machines cannot reach; "
            "set a URL such as s3://bucket/models, or set register.model_registry to null"
        )


def entry_of(snapshot: Snapshot, version: Mapping[str, Any], uri: str) -> Entry:
    """Return the entry of a registered version with its weights at `uri`, as registered by this Kubeflow run."""
    tag = version["tag"]
    pipeline_commit = snapshot.repository.git(
        "log", "-1", "--format=%(trailers:key=Pipeline-Commit,valueonly)", f"refs/tags/{tag}"
    )
    verdict, summary, provenance = (
        json.loads(snapshot.read(tag, f"{name}.json")) for name in ("verdict", "summary", "provenance")
    )
    accuracies = [
        f"{100 * score['accuracy']:.1f} % of {score['total']:,} problems of {source}"
        for source, score in summary["models"]["grpo"].items()
    ]
    gate = "passed" if verdict["passed"] else "missed"
    return Entry(
        name=version["name"],
        version=version["version"],
        uri=uri,
        description=f"{tag}: answers {', '.join(accuracies)}; {gate} the promotion gate",
        properties={
            **scores(verdict, summary),
            **_provenance(summary, provenance),
            _DIGEST: version["policy_digest"],
            "bundle_digest": version["bundle_digest"],
            "parent": version["parent"] or "none",
            "dvc_md5": md5_in(snapshot.read(tag, f"{POLICY}.dvc")),
            "git_sha": pipeline_commit.strip(),
            "registry": version["registry"],
            "registry_tag": tag,
        },
        source=_current_run(),
    )


def scores(verdict: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Value]:
    """Return the accuracies of each model, on the gate's targets together and on each source, and the verdict."""
    target = verdict["target"]
    properties: dict[str, Value] = {}
    for model, by_source in summary["models"].items():
        target_scores = [by_source[source] for source in target["sources"]]
        correct = sum(score["correct"] for score in target_scores)
        total = sum(score["total"] for score in target_scores)
        properties[f"accuracy_{model}"] = float(correct / total)
        for source, score in by_source.items():
            properties[f"accuracy_{model}.{source}"] = float(score["accuracy"])
    return {
        **properties,
        "gain": float(target["gain"]),
        "p_value": float(target["p_value"]),
        "num_test_problems": target["grpo"]["total"],
        "gate_passed": verdict["passed"],
        "target": target["source"],
    }


def _provenance(summary: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Value]:
    """Return what a version was made from: model, data, params and code, without unknown values."""
    configs = provenance["configs"]
    repository = configs.get("prepare_data", {}).get("repository") or {}
    properties = {
        "base_model": configs.get("train_sft", {}).get("model", {}).get("base"),
        "data_repository": repository.get("url"),
        "data_revision": repository.get("commit"),
        "data_digest": summary["digests"].get("problems"),
        "params_digest": summary["digests"].get("params"),
        "code_digest": provenance["code"],
    }
    return {name: value for name, value in properties.items() if value}


def _current_run() -> dict[str, str]:
    """Return the fields `model_source_*` of the Kubeflow run of this process; empty outside Kubeflow."""
    run_id = os.environ.get(RUN_ID_VARIABLE)
    if not run_id:
        return {}
    file = _SERVICE_ACCOUNT / "namespace"
    return {
        "model_source_kind": "kfp",
        "model_source_class": "pipelinerun",
        "model_source_group": file.read_text(encoding="utf-8").strip() if file.is_file() else "",
        "model_source_id": run_id,
        "model_source_name": os.environ.get(RUN_NAME_VARIABLE) or run_id,
    }


async def _announce(client: "ModelRegistryAPIClient", entry: Entry) -> bool:
    """Send the requests of `Catalogue.announce`."""
    from model_registry.types import ModelVersion, RegisteredModel

    model, _ = await _ensure(
        lambda: client.get_registered_model_by_params(entry.name),
        lambda: client.upsert_registered_model(
            RegisteredModel(name=entry.name, owner=_AUTHOR, description="Language models trained with GRPO")
        ),
    )
    run = {"run_id": entry.source["model_source_id"]} if entry.source else {}
    version = ModelVersion(
        name=entry.version, author=_AUTHOR, description=entry.description, custom_properties={**entry.properties, **run}
    )
    known_version, version_is_new = await _ensure(
        lambda: client.get_model_version_by_params(str(model.id), entry.version),
        lambda: client.upsert_model_version(version, str(model.id)),
    )
    digest, known_digest = entry.properties[_DIGEST], (known_version.custom_properties or {}).get(_DIGEST)
    if known_digest != digest:
        weights = f"weights with digest {str(known_digest)[:12]}" if known_digest else "weights of unknown digest"
        raise PipelineError(
            f"{entry.name} {entry.version}: the model registry has {weights} under this version instead of "
            f"{str(digest)[:12]}; give register.name another name"
        )
    return await _ensure_artifact(client, entry, str(known_version.id)) or version_is_new


async def _ensure_artifact(client: "ModelRegistryAPIClient", entry: Entry, version_id: str) -> bool:
    """Create the artifact of an announced version unless it exists; return whether it is new."""
    from model_registry.types import ModelArtifact
    from mr_openapi import ArtifactState

    async def find() -> ModelArtifact | None:
        artifacts = await client.get_model_artifacts(version_id)
        return next((artifact for artifact in artifacts if artifact.name == entry.name), None)

    artifact = ModelArtifact(
        name=entry.name,
        uri=entry.uri,
        description=f"Weights of {entry.name} {entry.version} as Hugging Face saves them",
        state=ArtifactState.LIVE,
        # The format that KServe's runtime for Hugging Face models, which runs vLLM, supports.
        model_format_name="huggingface",
        model_format_version="1",
        custom_properties={_DIGEST: entry.properties[_DIGEST]},
        **entry.source,
    )
    known, is_new = await _ensure(find, lambda: client.upsert_model_version_artifact(artifact, version_id))
    if known.uri != entry.uri:
        raise PipelineError(
            f"{entry.name} {entry.version}: the weights are at {entry.uri}, but the model registry has the address "
            f"{known.uri}; correct the artifact there"
        )
    return is_new


async def _update(client: "ModelRegistryAPIClient", name: str, statuses: Mapping[str, Status]) -> int:
    """Send the requests of `Catalogue.update`."""
    from mr_openapi import ModelVersionState

    model = await client.get_registered_model_by_params(name)
    if model is None:
        return 0
    num_changed = 0
    for number, status in statuses.items():
        version = await client.get_model_version_by_params(str(model.id), number)
        if version is None:
            continue
        state = ModelVersionState.ARCHIVED if status.withdrawn else ModelVersionState.LIVE
        properties = {**(version.custom_properties or {}), "aliases": ", ".join(status.aliases) or "none"}
        if (version.state, version.custom_properties) != (state, properties):
            version.state, version.custom_properties = state, properties
            await client.upsert_model_version(version)
            num_changed += 1
    return num_changed


async def _missing(client: "ModelRegistryAPIClient", name: str, numbers: Iterable[str]) -> list[str]:
    """Send the requests of `Catalogue.missing`."""
    model = await client.get_registered_model_by_params(name)
    missing = []
    for number in numbers:
        version = await client.get_model_version_by_params(str(model.id), number) if model else None
        # The artifact is created last: with it the announcement is complete.
        if version is None or not await client.get_model_artifacts(str(version.id)):
            missing.append(number)
    return missing


async def _ensure(find: Callable[[], Awaitable[Any]], create: Callable[[], Awaitable[Any]]) -> tuple[Any, bool]:
    """Return the result of `find`, or of `create` if `find` returns None, and whether it is new."""
    from mr_openapi.exceptions import ConflictException

    known = await find()
    if known is not None:
        return known, False
    try:
        return await create(), True
    except ConflictException:  # somebody else has created it in the meantime
        known = await find()
        if known is None:
            raise
        return known, False
