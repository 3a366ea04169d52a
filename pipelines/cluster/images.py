"""Do registries have the images of a pipeline? Asked as a node would ask, before a run can fail for want of them.

The protocol is the distribution API of the Open Container Initiative: a HEAD request for the manifest, with the
credentials that `podman login` or `docker login` left.
"""

import base64
import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from components.shared.errors import PipelineError

_TIMEOUT_S = 5
_MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_REFERENCE = re.compile(r"([^/]+)/([^:@]+)(?::([^@]+))?(?:@(sha256:[0-9a-f]{64}))?")
_HUB, _HUB_API, _HUB_LOGIN = "docker.io", "registry-1.docker.io", "index.docker.io"
_LOOPBACK = re.compile(r"(localhost|127\.[\d.]+|\[::1\])(:\d+)?")
_IDENTITY = "<token>"
"""User name with which a credential helper marks an identity token."""
_PUSH = (
    "set IMAGE_REGISTRY and IMAGE_TAG as `make images` prints, or build and push with `grpo-pipeline publish --build`"
)


class _UnknownError(Exception):
    """The registry does not tell whether it has an image."""


class _Image(NamedTuple):
    host: str
    name: str
    reference: str


class _Login(NamedTuple):
    user: str
    secret: str


def check(images: Sequence[str], *, allow_local: bool = False) -> list[str]:
    """Return a note for each image of which it is unknown whether nodes can pull it.

    Args:
        images: References, as in the pipeline.
        allow_local: Note images that no registry can have: somebody may have loaded them onto every node.

    Raises:
        PipelineError: Of images that no registry has; all are named.
    """
    missing: list[str] = []
    notes: list[str] = []
    unreachable: dict[str, str] = {}
    for image in images:
        parsed = _parse(image)
        if parsed is None:
            (notes if allow_local else missing).append(f"no registry has {image}; {_PUSH}")
            continue
        try:
            if parsed.host in unreachable:
                raise _UnknownError(unreachable[parsed.host])
            if not _exists(parsed):
                missing.append(f"{parsed.host} does not have {image}; push it, or {_PUSH}")
        except _UnknownError as error:
            notes.append(f"{image}: {error}")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            unreachable[parsed.host] = f"not checked, because {parsed.host} cannot be reached from here ({reason})"
            notes.append(f"{image}: {unreachable[parsed.host]}")
    if missing:
        raise PipelineError("\n".join(missing))
    return notes


def _parse(image: str) -> _Image | None:
    """Return the parts of a reference; None where it names no registry, or a tag that each machine gives by itself."""
    parts = _REFERENCE.fullmatch(image)
    if parts is None:
        return None
    host, name, tag, digest = parts.groups()
    if not re.search(r"[.:]", host) or host.endswith(".invalid") or (tag == "dev" and not digest):
        return None
    name = f"library/{name}" if host == _HUB and "/" not in name else name
    return _Image(host, name, digest or tag or "latest")


def _exists(image: _Image) -> bool:
    """Tell whether a registry has an image.

    Raises:
        _UnknownError: It does not say.
        OSError: It does not answer.
    """
    scheme = "http" if _LOOPBACK.fullmatch(image.host) else "https"
    host = _HUB_API if image.host == _HUB else image.host
    url = f"{scheme}://{host}/v2/{image.name}/manifests/{image.reference}"
    status, challenge = _head(url, "")
    if status == 401:
        status, _ = _head(url, _authorization(image, challenge))
    if status not in (200, 404):
        login = f"; log in with `podman login {image.host}`" if status in (401, 403) else ""
        raise _UnknownError(f"not checked, because {image.host} does not say whether it has it ({status}){login}")
    return status == 200


def _head(url: str, authorization: str) -> tuple[int, str]:
    """Return the status of a HEAD request, and the challenge of one that was not authorized."""
    request = urllib.request.Request(url, headers={"Accept": ", ".join(_MANIFESTS)}, method="HEAD")
    if authorization:
        request.add_unredirected_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("WWW-Authenticate", "")


def _authorization(image: _Image, challenge: str) -> str:
    """Return the header that answers a challenge: the credentials themselves, or a token that they are worth."""
    scheme, _, text = challenge.partition(" ")
    login = next(_logins(image), None)
    basic = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}" if login else ""
    parameters = dict(re.findall(r'(\w+)="([^"]*)"', text))
    if scheme.lower() != "bearer" or "realm" not in parameters:
        return basic
    query = {"service": parameters.get("service", ""), "scope": f"repository:{image.name}:pull"}
    if login and login.user == _IDENTITY:
        form = {**query, "grant_type": "refresh_token", "client_id": "grpo-pipeline", "refresh_token": login.secret}
        request = urllib.request.Request(parameters["realm"], urlencode(form).encode())
    else:
        request = urllib.request.Request(f"{parameters['realm']}?{urlencode(query)}")
        if basic:
            request.add_unredirected_header("Authorization", basic)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            token = json.load(answer)
    except urllib.error.HTTPError as error:
        what = "the credentials of `podman login` or `docker login`" if login else "requests without credentials"
        why = f"{image.host} refuses {what} ({error.code}); log in with `podman login {image.host}`"
        raise _UnknownError(f"not checked, because {why}") from error
    return f"Bearer {token.get('token') or token.get('access_token')}"


def _logins(image: _Image) -> Iterator[_Login]:
    """Yield what podman, and then docker, would log in with; of the entries for a registry the most specific first."""
    home = Path.home()
    files: list[str | Path] = [
        *filter(None, [os.environ.get("REGISTRY_AUTH_FILE")]),
        Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/containers/{os.getuid()}"), "containers/auth.json"),
        Path(f"/run/containers/{os.getuid()}/auth.json"),
        home / ".config/containers/auth.json",
        Path(os.environ.get("DOCKER_CONFIG", home / ".docker"), "config.json"),
    ]
    parts = image.name.split("/")
    keys = ["/".join([image.host, *parts[:count]]) for count in range(len(parts), -1, -1)]
    keys += [_HUB_LOGIN] if image.host == _HUB else []
    for file in map(Path, files):
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):
            settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            entries = {_bare(name): entry for name, entry in (settings.get("auths") or {}).items()}
            helpers = settings.get("credHelpers") or {}
            for key in keys:
                entry = entries.get(key, {})
                if entry.get("identitytoken"):
                    yield _Login(_IDENTITY, entry["identitytoken"])
                elif entry.get("auth"):
                    user, _, secret = base64.b64decode(entry["auth"]).decode().partition(":")
                    yield _Login(user, secret)
                elif helper := helpers.get(key) or (settings.get("credsStore") if key in entries else None):
                    yield from _ask_helper(helper, key)


def _bare(name: str) -> str:
    """Return the name of a registry as in a reference: docker writes the one of Docker Hub as a URL."""
    return re.sub(r"^https?://|/v[12]/?$", "", name).rstrip("/")


def _ask_helper(helper: str, registry: str) -> Iterator[_Login]:
    """Yield what a credential helper has for a registry."""
    url = f"https://{registry}/v1/" if registry == _HUB_LOGIN else registry
    command = [f"docker-credential-{helper}", "get"]
    done = subprocess.run(command, input=url, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode == 0:
        login = json.loads(done.stdout)
        yield _Login(login["Username"], login["Secret"])
