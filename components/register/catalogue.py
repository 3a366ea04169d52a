"""Kubeflow Model Registry: the catalogue in which a cluster's users look for models learns of each registered version.

An announcement creates a model, a version and an artifact, one request each. What exists already is compared instead,
so that a run which was killed between two requests is completed by the next one.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import yaml

from components.register.registry import POLICY, VERSION_FILE, Registry, is_url
from components.shared.environment import (
    CATALOGUE_CA_VARIABLE,
    CATALOGUE_TOKEN_FILE_VARIABLES,
    CATALOGUE_TOKEN_VARIABLE,
    RUN_ID_VARIABLE,
    RUN_NAME_VARIABLE,
)
from components.shared.errors import PipelineError, RetryableError

if TYPE_CHECKING:
    from model_registry.core import ModelRegistryAPIClient

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PORTS = {"http": 8080, "https": 443}
_CLIENT_VERSION = "v1"
"""Version of the API in every path of the client; servers of other releases have another one."""
_SUPPORTED = (_CLIENT_VERSION, "v1alpha3")
_UNSUPPORTED = ("v1beta1", "v1alpha2", "v1alpha1", "v2")
_TIMEOUT_S = 60.0
_AUTHOR = "grpo-pipeline"
_DIGEST = "policy_digest"

T = TypeVar("T")
Value = bool | int | float | str


@dataclass(frozen=True)
class Run:
    """The Kubeflow run that registered a version."""

    run_id: str
    name: str
    namespace: str


@dataclass(frozen=True)
class Entry:
    """One version, as the catalogue is to show it."""

    name: str
    version: str
    uri: str
    """Permanent address of the weights."""
    policy_digest: str
    properties: Mapping[str, Value]
    """What can be sorted and filtered by: numbers stay numbers."""
    run: Run | None


class Catalogue:
    """A connection to a model registry.

    Raises:
        PipelineError: The address is invalid, a file that the environment names is unreadable, or the server refuses.
        RetryableError: The server cannot be reached, or has a temporary error.
    """

    def __init__(self, address: str, environment: Mapping[str, str] = os.environ) -> None:
        self._address, self._environment = address, environment
        self._api_version = self._run(_find_api_version)

    def announce(self, entry: Entry) -> bool:
        """Create the model, version and artifact of an entry; returns whether any of them was missing.

        Raises:
            PipelineError: The catalogue has other weights under this name and version, or refuses.
            RetryableError: The server cannot be reached, or has a temporary error.
        """
        return self._run(lambda access: _announce(access, self._api_version, entry))

    def _run(self, work: "Callable[[_Access], Coroutine[Any, Any, T]]") -> T:
        access = _access(self._address, self._environment)  # each time: token files are renewed
        return asyncio.run(_with_errors_explained(access, work(access)))


def weights_url(registry: Registry) -> str:
    """Return the URL of the storage of the weights; PipelineError if it is a folder, useless on other machines."""
    url = registry.storage_url()
    if not is_url(url) or url.startswith("file:"):
        raise PipelineError(
            f"register.storage: the weights are in the folder {url}, which other machines cannot reach; "
            "set a URL such as s3://bucket/models, or set register.model_registry to null"
        )
    return url.rstrip("/")


def entry_of(registry: Registry, version: Mapping[str, Any]) -> Entry:
    """Return the entry of a registered version; everything but the run is read from the version itself."""
    tag = version["tag"]
    md5 = yaml.safe_load(registry.read(tag, f"{POLICY}.dvc"))["outs"][0]["md5"]
    verdict, summary, provenance = (
        json.loads(registry.read(tag, f"{name}.json")) for name in ("verdict", "summary", "provenance")
    )
    return Entry(
        name=version["name"],
        version=version["version"],
        uri=f"{weights_url(registry)}/files/md5/{md5[:2]}/{md5[2:]}",
        policy_digest=version["policy_digest"],
        properties={
            **scores(verdict, summary),
            **_provenance(summary, provenance),
            _DIGEST: version["policy_digest"],
            "dvc_md5": md5,
            "git_sha": registry.pipeline_commit(tag),
            "registry": json.loads(registry.read(tag, VERSION_FILE))["registry"],
            "registry_tag": tag,
        },
        run=_current_run(os.environ),
    )


def scores(verdict: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Value]:
    """Return the accuracy of each model, on the gate's target (problems pooled) and on each source, and the verdict."""
    target = verdict["target"]
    properties: dict[str, Value] = {}
    for model, by_source in summary["models"].items():
        pooled = [by_source[source] for source in target["sources"]]
        correct, total = (sum(score[key] for score in pooled) for key in ("correct", "total"))
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


def _current_run(environment: Mapping[str, str]) -> Run | None:
    run_id = environment.get(RUN_ID_VARIABLE)
    if not run_id:
        return None
    file = _SERVICE_ACCOUNT / "namespace"
    namespace = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return Run(run_id, environment.get(RUN_NAME_VARIABLE) or run_id, namespace)


@dataclass(frozen=True)
class _Access:
    """How to reach a model registry."""

    address: str
    """With scheme and port."""
    token: str | None
    token_origin: str
    """For messages, which never have the token itself."""
    ca_file: str | None


def _access(address: str, environment: Mapping[str, str]) -> _Access:
    """Return address, current token and certificates; secrets are in the environment, never in parameters."""
    parts = urlsplit(address)
    if parts.scheme not in _PORTS or not parts.hostname or parts.username:
        raise PipelineError(
            f"register.model_registry: {address} is not a valid address; use one such as "
            "http://model-registry-service.kubeflow.svc.cluster.local:8080, without credentials"
        )
    token, ca_file = environment.get(CATALOGUE_TOKEN_VARIABLE), environment.get(CATALOGUE_CA_VARIABLE) or None
    origin = CATALOGUE_TOKEN_VARIABLE if token else None
    pod_token = str(_SERVICE_ACCOUNT / "token") if (_SERVICE_ACCOUNT / "token").is_file() else None
    own_file, kubeflow_file = (environment.get(name) for name in CATALOGUE_TOKEN_FILE_VARIABLES)
    token_file = own_file or (None if token else kubeflow_file or pod_token)
    for path, content in ((token_file, "token"), (ca_file, "certificates")):
        if path and not os.access(path, os.R_OK):
            raise PipelineError(f"{path}: no readable file with the {content} of the model registry")
    if token_file:
        token, origin = Path(token_file).read_text(encoding="utf-8").strip(), token_file
    set_one = f"there is none; set {CATALOGUE_TOKEN_FILE_VARIABLES[0]} or {CATALOGUE_TOKEN_VARIABLE}"
    token_origin = f"this one is from {origin}" if origin else set_one
    return _Access(
        f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS[parts.scheme]}", token, token_origin, ca_file
    )


async def _find_api_version(access: _Access) -> str:
    """Return the version of the API that the server has; asked before anything is registered."""
    from mr_openapi.exceptions import NotFoundException

    for version in (*_SUPPORTED, *_UNSUPPORTED):
        async with _client(access, version) as client, client.get_client() as api:
            try:
                await api.get_registered_models(page_size="1")
            except NotFoundException:
                continue
        if version in _UNSUPPORTED:
            raise PipelineError(
                f"{access.address}: this model registry has version {version} of the API; "
                f"supported: {' and '.join(_SUPPORTED)}"
            )
        return version
    raise PipelineError(f"{access.address}: not a model registry: it has no /api/model_registry/{_CLIENT_VERSION}/")


async def _announce(access: _Access, api_version: str, entry: Entry) -> bool:
    from model_registry.types import RegisteredModel

    async with _client(access, api_version) as client:
        model = RegisteredModel(name=entry.name, owner=_AUTHOR, description="Language models trained with GRPO")
        registered, _ = await _ensure(
            lambda: client.get_registered_model_by_params(entry.name), lambda: client.upsert_registered_model(model)
        )
        version_id, is_new = await _ensure_version(client, entry, str(registered.id))
        return await _ensure_artifact(client, entry, version_id) or is_new


async def _ensure_version(client: "ModelRegistryAPIClient", entry: Entry, model_id: str) -> tuple[str, bool]:
    """Return the id of the version and whether it is new; an existing one must have the same weights."""
    from model_registry.types import ModelVersion

    version = ModelVersion(
        name=entry.version,
        author=_AUTHOR,
        description=f"{entry.properties['registry_tag']} in {entry.properties['registry']}",
        custom_properties={**entry.properties, **({"run_id": entry.run.run_id} if entry.run else {})},
    )
    known, is_new = await _ensure(
        lambda: client.get_model_version_by_params(model_id, entry.version),
        lambda: client.upsert_model_version(version, model_id),
    )
    digest = (known.custom_properties or {}).get(_DIGEST)
    if digest != entry.policy_digest:
        weights = f"weights with digest {str(digest)[:12]}" if digest else "weights of unknown digest"
        raise PipelineError(
            f"{entry.name} {entry.version}: the model registry has {weights} under this version instead of "
            f"{entry.policy_digest[:12]}; give register.name another name"
        )
    return str(known.id), is_new


async def _ensure_artifact(client: "ModelRegistryAPIClient", entry: Entry, version_id: str) -> bool:
    """Attach the address of the weights to the version, if it is missing; returns whether it was."""
    from model_registry.types import ModelArtifact

    async def find() -> ModelArtifact | None:
        artifacts = await client.get_model_artifacts(version_id)
        return next((artifact for artifact in artifacts if artifact.name == entry.name), None)

    run = entry.run
    artifact = ModelArtifact(
        name=entry.name,
        uri=entry.uri,
        model_format_name="safetensors",
        model_format_version="1",
        custom_properties={_DIGEST: entry.policy_digest},
        model_source_kind="kfp" if run else None,
        model_source_class="pipelinerun" if run else None,
        model_source_group=run.namespace if run else None,
        model_source_id=run.run_id if run else None,
        model_source_name=run.name if run else None,
    )
    known, is_new = await _ensure(find, lambda: client.upsert_model_version_artifact(artifact, version_id))
    if known.uri != entry.uri:
        raise PipelineError(
            f"{entry.name} {entry.version}: the weights are at {entry.uri}, but the model registry has the address "
            f"{known.uri}; correct the artifact there"
        )
    return is_new


async def _ensure(find: Callable[[], Awaitable[Any]], create: Callable[[], Awaitable[Any]]) -> tuple[Any, bool]:
    """Return what `find` returns, or what `create` creates, and whether it is new."""
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


@asynccontextmanager
async def _client(access: _Access, api_version: str) -> AsyncIterator["ModelRegistryAPIClient"]:
    """Yield a client for the server's version of the API that keeps its connections."""
    from model_registry.core import ModelRegistryAPIClient
    from mr_openapi import ApiClient, Configuration, ModelRegistryServiceApi

    class VersionedApiClient(ApiClient):  # type: ignore[misc]
        """Replaces the version of the API in the paths by the server's."""

        def param_serialize(self, method: str, resource_path: str, *rest: Any, **options: Any) -> Any:
            path = resource_path.replace(f"/{_CLIENT_VERSION}/", f"/{api_version}/", 1)
            return super().param_serialize(method, path, *rest, **options)

    class Client(ModelRegistryAPIClient):  # type: ignore[misc]
        """Unlike the original, it keeps its connection between requests."""

        @asynccontextmanager
        async def get_client(self) -> AsyncIterator[Any]:
            yield ModelRegistryServiceApi(connection)

    configuration = Configuration(host=access.address, access_token=access.token, ssl_ca_cert=access.ca_file)
    connection = VersionedApiClient(configuration)
    try:
        yield Client(configuration)
    finally:
        await connection.close()


async def _with_errors_explained(access: _Access, work: Coroutine[Any, Any, T]) -> T:
    """Do some work within the time limit and turn the errors of the client into one line."""
    import aiohttp
    from mr_openapi.exceptions import ApiException, ForbiddenException, UnauthorizedException

    try:
        return await asyncio.wait_for(work, _TIMEOUT_S)
    except UnauthorizedException:
        raise PipelineError(f"{access.address}: the model registry rejects the token; {access.token_origin}") from None
    except ForbiddenException as error:
        raise PipelineError(f"{access.address}: the model registry denies access ({_reason(error)})") from None
    except ApiException as error:
        is_temporary = error.status == 429 or (error.status or 0) >= 500
        kind = RetryableError if is_temporary else PipelineError
        raise kind(f"{access.address}: the model registry answers {error.status} ({_reason(error)})") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or f"no answer within {_TIMEOUT_S:.0f} s"
        raise RetryableError(f"{access.address}: cannot reach the model registry ({reason})") from None


def _reason(error: Any) -> str:
    return " ".join(str(error.body or error.reason).split())[:200]
