"""Kubeflow Model Registry: the catalogue in which a cluster's users look for models learns of a registered version.

Model, version and artifact are three requests, and none of them is made twice: whatever a run that was killed between
them left is found, compared and completed by the next one.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from components.register.catalogue_access import Access
from components.register.catalogue_entry import Entry
from components.shared.errors import PipelineError, RetryableError

if TYPE_CHECKING:
    from model_registry.core import ModelRegistryAPIClient
    from model_registry.types import ModelArtifact

_CLIENT_SPEAKS = "v1"
"""Written into every path of the client; servers of another release have the next one or the one before it."""
_SPOKEN = (_CLIENT_SPEAKS, "v1alpha3")
_OTHERS = ("v1beta1", "v1alpha2", "v1alpha1", "v2")
_TIMEOUT_S = 60.0
_AUTHOR = "grpo-pipeline"
_DIGEST = "policy_digest"

T = TypeVar("T")


class Catalogue:
    """A model registry that has been reached, and the version of the API that it speaks."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._speaks = self._run(_probe(access))

    def announce(self, entry: Entry) -> bool:
        """Make a version known with all that belongs to it; returns whether anything of it was missing.

        Raises:
            PipelineError: The catalogue has other weights under this name and version, or refuses.
            RetryableError: It cannot be reached, or answers that it cannot answer now.
        """
        return self._run(_announce(self._access, self._speaks, entry))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(_explained(self._access, work))


async def _probe(access: Access) -> str:
    """Return the version of the API that a server speaks, before anything is registered that it would have to know."""
    from mr_openapi.exceptions import NotFoundException

    for version in (*_SPOKEN, *_OTHERS):
        async with _api(access, version) as api, api.get_client() as client:
            try:
                await client.get_registered_models(page_size="1")
            except NotFoundException:
                continue
        if version in _OTHERS:
            raise PipelineError(
                f"{access.address}: this model registry speaks {version} of its API; {' and '.join(_SPOKEN)} are "
                "understood here"
            )
        return version
    raise PipelineError(f"{access.address}: is no model registry: it has no /api/model_registry/{_CLIENT_SPEAKS}/")


async def _announce(access: Access, speaks: str, entry: Entry) -> bool:
    async with _api(access, speaks) as api:
        model_id = await _ensure_model(api, entry.name)
        version_id, is_new = await _ensure_version(api, entry, model_id)
        attached = await _ensure_artifact(api, entry, version_id)
    return is_new or attached


async def _ensure_model(api: "ModelRegistryAPIClient", name: str) -> str:
    from model_registry.types import RegisteredModel

    model = await api.get_registered_model_by_params(name)
    if model is None:
        made = RegisteredModel(name=name, owner=_AUTHOR, description="Language models trained with GRPO")
        model = await _made(api.upsert_registered_model(made), api.get_registered_model_by_params, name)
    return str(model.id)


async def _ensure_version(api: "ModelRegistryAPIClient", entry: Entry, model_id: str) -> tuple[str, bool]:
    """Return the id of the version and whether it was made now; those it has must be the same weights."""
    from model_registry.types import ModelVersion

    found = await api.get_model_version_by_params(model_id, entry.version)
    is_new = found is None
    if found is None:
        properties = dict(entry.properties)
        if entry.origin is not None:
            properties["run_id"] = entry.origin.run_id
        description = f"{entry.properties['registry_tag']} in {entry.properties['registry']}"
        made = ModelVersion(name=entry.version, author=_AUTHOR, description=description, custom_properties=properties)
        known = api.get_model_version_by_params
        found = await _made(api.upsert_model_version(made, model_id), known, model_id, entry.version)
    digest = (found.custom_properties or {}).get(_DIGEST)
    if digest != entry.policy_digest:
        whose = f"weights with digest {str(digest)[:12]}" if digest else "weights of unknown digest"
        raise PipelineError(
            f"{entry.name} {entry.version}: the model registry has {whose} under this version, and "
            f"{entry.policy_digest[:12]} was to be registered; give register.name another name"
        )
    return str(found.id), is_new


async def _ensure_artifact(api: "ModelRegistryAPIClient", entry: Entry, version_id: str) -> bool:
    """Attach the address of the weights, unless it is there; returns whether it was attached now."""

    async def attached(version_id: str) -> "ModelArtifact | None":
        listed = await api.get_model_artifacts(version_id)
        return next((each for each in listed if each.name == entry.name), None)

    found = await attached(version_id)
    is_new = found is None
    if found is None:
        found = await _made(api.upsert_model_version_artifact(_artifact(entry), version_id), attached, version_id)
    if found.uri != entry.uri:
        raise PipelineError(
            f"{entry.name} {entry.version}: the model registry says that the weights lie at {found.uri}, and they lie "
            f"at {entry.uri}; correct the artifact there"
        )
    return is_new


def _artifact(entry: Entry) -> "ModelArtifact":
    from model_registry.types import ModelArtifact

    origin = entry.origin
    return ModelArtifact(
        name=entry.name,
        uri=entry.uri,
        model_format_name="safetensors",
        model_format_version="1",
        custom_properties={_DIGEST: entry.policy_digest},
        model_source_kind="kfp" if origin else None,
        model_source_class="pipelinerun" if origin else None,
        model_source_group=origin.namespace if origin else None,
        model_source_id=origin.run_id if origin else None,
        model_source_name=origin.run_name if origin else None,
    )


async def _made(making: Coroutine[Any, Any, Any], known: Any, *names: str) -> Any:
    """Return what was made, or what somebody else made at the same moment under the same name."""
    from mr_openapi.exceptions import ConflictException

    try:
        return await making
    except ConflictException:
        found = await known(*names)
        if found is None:
            raise
        return found


@asynccontextmanager
async def _api(access: Access, version: str) -> AsyncIterator["ModelRegistryAPIClient"]:
    """The client, speaking the version of the API that the server does, over connections that it keeps."""
    from model_registry.core import ModelRegistryAPIClient
    from mr_openapi import ApiClient, Configuration, ModelRegistryServiceApi

    class Spoken(ApiClient):  # type: ignore[misc]
        """Writes the server's version into the paths."""

        def param_serialize(self, method: str, resource_path: str, *rest: Any, **options: Any) -> Any:
            path = resource_path.replace(f"/{_CLIENT_SPEAKS}/", f"/{version}/", 1)
            return super().param_serialize(method, path, *rest, **options)

    class Client(ModelRegistryAPIClient):  # type: ignore[misc]
        """The real one would connect anew for each request."""

        @asynccontextmanager
        async def get_client(self) -> AsyncIterator[Any]:
            yield ModelRegistryServiceApi(connected)

    configuration = Configuration(host=access.address, access_token=access.token(), ssl_ca_cert=access.ca_file)
    connected = Spoken(configuration)
    try:
        yield Client(configuration)
    finally:
        await connected.close()


async def _explained(access: Access, work: Coroutine[Any, Any, T]) -> T:
    """Do some work within the time that is given, and say in one line why it fails."""
    import aiohttp
    from mr_openapi.exceptions import ApiException, ForbiddenException, UnauthorizedException

    try:
        return await asyncio.wait_for(work, _TIMEOUT_S)
    except UnauthorizedException:
        raise PipelineError(f"{access.address}: the model registry asks for another token; {access.origin}") from None
    except ForbiddenException as error:
        raise PipelineError(f"{access.address}: the model registry forbids it ({_said(error)})") from None
    except ApiException as error:
        again = error.status == 429 or (error.status or 0) >= 500
        kind = RetryableError if again else PipelineError
        raise kind(f"{access.address}: the model registry answers {error.status} ({_said(error)})") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        why = str(error) or "no answer in time"
        raise RetryableError(f"{access.address}: the model registry cannot be reached ({why})") from None


def _said(error: Any) -> str:
    words = " ".join(str(error.body or error.reason).split())
    return words[:200]
