"""Whether a registry has an image, asked of a real one (Debian's docker-registry), and of one that hands out tokens."""

import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from components.shared.errors import PipelineError
from pipelines.cluster import images
from pipelines.cluster.images import check

REGISTRY = shutil.which("docker-registry")
needs_registry = pytest.mark.skipif(REGISTRY is None, reason="no docker-registry (apt-get install docker-registry)")
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
HASH = "$2b$05$RLS50diZJmKWTgd6bjkIVeY.q/RbgVz.zQq60lOzN6083t/djigd6"
LOGIN = base64.b64encode(b"team:s3cr3t").decode()


@pytest.fixture(autouse=True)
def auth_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which `podman login` keeps credentials; nobody else has any."""
    for name in ("HOME", "XDG_RUNTIME_DIR", "DOCKER_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    return tmp_path / "auth.json"


@contextmanager
def registry(folder: Path, settings: str) -> Iterator[str]:
    """Run a registry with more settings; gives its address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        host = f"127.0.0.1:{taken.getsockname()[1]}"
    config = f"version: 0.1\nlog: {{level: error}}\nstorage: {{inmemory: {{}}}}\nhttp: {{addr: '{host}'}}\n{settings}"
    (folder / "registry.yml").write_text(config)
    command = [str(REGISTRY), "serve", str(folder / "registry.yml")]
    # It takes variables that begin with REGISTRY for settings of its own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REGISTRY")}
    null = subprocess.DEVNULL
    with subprocess.Popen(command, env=environment, stdout=null, stderr=null) as process:
        try:
            deadline = time.monotonic() + 30
            while call(f"http://{host}/v2/") not in (200, 401):
                assert time.monotonic() < deadline, "the registry does not start"
                time.sleep(0.05)
            yield host
        finally:
            process.terminate()


def call(url: str, body: bytes | None = None, method: str = "GET", **headers: str) -> int:
    """Send a request as the owner of images; return the status, 0 where nobody answers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, {"Authorization": f"Basic {LOGIN}", **named}, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def push(host: str, name: str, tag: str) -> str:
    """Push an image without layers; return its digest."""
    blob = b"{}"
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    request = urllib.request.Request(f"http://{host}/v2/{name}/blobs/uploads/", b"", method="POST")
    request.add_header("Authorization", f"Basic {LOGIN}")
    with urllib.request.urlopen(request) as answer:
        place = answer.headers["Location"]
    assert call(f"{place}&digest={digest}", blob, "PUT", Content_Type="application/octet-stream") == 201
    config = {"mediaType": CONFIG, "digest": digest, "size": len(blob)}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": []}).encode()
    assert call(f"http://{host}/v2/{name}/manifests/{tag}", manifest, "PUT", Content_Type=MANIFEST) == 201
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


@pytest.mark.slow
@needs_registry
def test_a_registry_is_asked_with_the_credentials_of_a_login(tmp_path: Path, auth_file: Path) -> None:
    """By tag and by digest; without credentials it does not say, and that is no obstacle."""
    (tmp_path / "users").write_text(f"team:{HASH}\n")
    with registry(tmp_path, f"auth: {{htpasswd: {{realm: test, path: '{tmp_path}/users'}}}}\n") as host:
        digest = push(host, "ml/python-light", "0123abc")
        there = [f"{host}/ml/python-light:0123abc", f"{host}/ml/python-light@{digest}"]
        gone = [f"{host}/ml/python-light:4567def", f"{host}/ml/python-gpu:0123abc"]
        (note,) = check(there[:1])
        assert f"{host} does not say whether it has it (401); log in with `podman login {host}`" in note
        auth_file.write_text(json.dumps({"auths": {host: {"auth": "eDp5"}, f"{host}/ml": {"auth": LOGIN}}}))
        assert check(there) == []
        with pytest.raises(PipelineError) as refused:
            check([*there, *gone])
        assert [line.split(";")[0] for line in str(refused.value).splitlines()] == [
            f"{host} does not have {image}" for image in gone
        ]
    assert "cannot be reached from here" in check(there)[0]


@pytest.fixture
def token_registry(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """A registry whose tokens another service gives to whoever logs in; its address, and what that was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            granted = self.headers["Authorization"] == "Bearer granted"
            scope = f'Bearer realm="http://{host}/token",service="images",scope="repository:ml/gpu:pull"'
            status = 401 if not granted else 200 if self.path == "/v2/ml/gpu/manifests/0123abc" else 404
            self.answer(status, b"", **({} if granted else {"WWW_Authenticate": scope}))

        def give(self, form: dict[str, list[str]], login: str | None) -> None:
            assert (form["service"], form["scope"]) == (["images"], ["repository:ml/gpu:pull"])
            asked.append(login or "")
            known = login in (f"Basic {LOGIN}", "an identity token")
            self.answer(*((200, b'{"token": "granted"}') if known else (401, b"{}")))

        def do_GET(self) -> None:
            self.give(parse_qs(urlsplit(self.path).query), self.headers["Authorization"])

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.give(form, form["refresh_token"][0])

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    host = f"127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield host, asked
    server.shutdown()
    server.server_close()


def in_a_file(host: str, auth_file: Path) -> None:
    """Credentials as podman keeps them."""
    auth_file.write_text(json.dumps({"auths": {host: {"auth": LOGIN}}}))


def in_a_helper(host: str, auth_file: Path) -> None:
    """A program that docker is told to ask."""
    helper = auth_file.with_name("docker-credential-vault")
    helper.write_text(f'#!/bin/sh\ntest "$(cat)" = {host} && echo \'{{"Username": "team", "Secret": "s3cr3t"}}\'\n')
    helper.chmod(0o755)
    auth_file.with_name("config.json").write_text(json.dumps({"credHelpers": {host: "vault"}}))


def as_an_identity(host: str, auth_file: Path) -> None:
    """A token in the place of a password."""
    entry = {"auth": base64.b64encode(b"0:").decode(), "identitytoken": "an identity token"}
    auth_file.with_name("config.json").write_text(json.dumps({"auths": {f"https://{host}/v2/": entry}}))


@pytest.mark.parametrize("log_in", [in_a_file, in_a_helper, as_an_identity])
def test_a_token_is_fetched_where_the_registry_wants_one(
    token_registry: tuple[str, list[str]],
    auth_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_in: Callable[[str, Path], None],
) -> None:
    """With what a login left; refused credentials are no obstacle, and said."""
    host, asked = token_registry
    image = f"{host}/ml/gpu:0123abc"
    assert f"{host} refuses requests without credentials (401); log in with `podman login {host}`" in check([image])[0]
    auth_file.write_text(json.dumps({"auths": {host: {"auth": "eDp5"}}}))
    assert f"{host} refuses the credentials of" in check([image])[0]
    auth_file.unlink()
    monkeypatch.setenv("PATH", f"{auth_file.parent}:/usr/bin:/bin")
    log_in(host, auth_file)
    assert check([image]) == []
    with pytest.raises(PipelineError, match="does not have"):
        check([f"{host}/ml/gpu:4567def"])
    assert asked[0] == ""
    assert len(asked) == 4


def test_a_login_that_cannot_be_read_is_no_obstacle(
    token_registry: tuple[str, list[str]], auth_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credential helper that waits for a person, or a challenge that does not say where tokens are."""
    host, _ = token_registry
    auth_file.write_text(json.dumps({"credHelpers": {host: "slow"}}))

    def wait(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 5)

    monkeypatch.setattr(subprocess, "run", wait)
    assert "refuses requests without credentials" in check([f"{host}/ml/gpu:0123abc"])[0]
    monkeypatch.setattr(images, "_head", lambda url, authorization: (401, 'Bearer service="images"'))
    assert "does not say whether it has it (401)" in check([f"{host}/ml/gpu:0123abc"])[0]


@pytest.mark.parametrize("image", ["localhost/ml/gpu:0123abc", "ml/gpu:0123abc", "gpu", "registry.example.com/gpu:dev"])
def test_a_name_of_this_machine_alone_is_refused_without_asking(image: str) -> None:
    """Nodes would look for it in places of their own; loaded onto them by hand it can be used."""
    with pytest.raises(PipelineError, match=f"no registry has {image}; set IMAGE_REGISTRY"):
        check([image])
    assert check([image], allow_local=True)[0].startswith(f"no registry has {image}")
