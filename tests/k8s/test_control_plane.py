"""What we create, sent to a real API server: with its etcd, installed as for envtest, and without controllers."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from kubernetes.client import ApiException

from components.cluster import kube
from components.shared.environment import KUBECONFIG_VARIABLE
from tests.fake_cluster.processes import free_port
from tests.fake_cluster.schemas import UPSTREAM, needs_upstream
from tests.k8s.rendered import K8S, NAMESPACES, OVERLAYS, require_kubectl
from tests.k8s.test_releases import VERSIONS

ASSETS = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
pytestmark = [
    pytest.mark.long(minutes=1),
    needs_upstream,
    pytest.mark.skipif(
        not all((ASSETS / name).is_file() for name in ("etcd", "kube-apiserver")),
        reason=f"{ASSETS} has no etcd and kube-apiserver; KUBEBUILDER_ASSETS names the folder that setup-envtest fills",
    ),
]
_TOKEN = "token-of-a-test"
_STARTS_S = 120


@pytest.fixture(scope="module")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of a real API server with the namespaces of the overlays."""
    with control_plane(tmp_path_factory.mktemp("control-plane")) as kubeconfig:
        for namespace in set(NAMESPACES.values()):
            kubectl(kubeconfig, "create", "namespace", namespace)
        yield kubeconfig


def kubectl(kubeconfig: Path, *arguments: str) -> None:
    """Run kubectl, which has to succeed."""
    require_kubectl()
    command = ["kubectl", "--kubeconfig", str(kubeconfig), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("trainer", "kueue"), [*zip(VERSIONS["Trainer"], VERSIONS["Kueue"], strict=True)])
def test_real_api_server_accepts_what_we_create(
    api_server: Path, trainer: str, kueue: str, manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All overlays and the queue, strictly; and a training job, which is then renewed and removed as a step does it."""
    for release in (f"trainer-{trainer}", f"kueue-{kueue}"):
        definitions = [f"--filename={path}" for path in sorted((UPSTREAM / release).glob("*.yaml"))]
        kubectl(api_server, "delete", "--ignore-not-found", *definitions)  # those of another release
        kubectl(api_server, "apply", "--server-side", *definitions)
        kubectl(api_server, "wait", "--for=condition=established", "--timeout=60s", *definitions)
    for folder in (*(f"overlays/{name}" for name in OVERLAYS), "cluster", "one-machine"):
        kubectl(api_server, "apply", "--validate=strict", "--dry-run=server", "--kustomize", str(K8S / folder))
    monkeypatch.setenv(KUBECONFIG_VARIABLE, str(api_server))
    jobs = kube.TrainJobs(kube.connect(), "kubeflow")
    manifest["metadata"]["namespace"] = jobs.namespace
    jobs.create(manifest)
    (job,) = jobs.find({})
    jobs.patch(job, {"annotations": {kube.HEARTBEAT: datetime.now(UTC).isoformat()}})
    name = job["metadata"]["name"]
    assert not jobs.delete(name, unchanged=job["metadata"])
    assert jobs.delete(name)
    assert jobs.find({}) == []
    manifest["spec"]["unknown"] = True
    with pytest.raises(ApiException, match=r'unknown field \\?"spec\.unknown'):
        jobs.create(manifest)


@contextmanager
def control_plane(folder: Path) -> Iterator[Path]:
    """Run an API server for as long as the block lasts; yield the kubeconfig of its administrator."""
    etcd, peers, port = (free_port() for _ in range(3))
    key, tokens, kubeconfig = folder / "service-accounts.pem", folder / "tokens.csv", folder / "kubeconfig"
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    key.write_bytes(rsa.generate_private_key(65537, 2048).private_bytes(*pem))
    tokens.write_text(f"{_TOKEN},admin,admin,system:masters\n")
    kubeconfig.write_text(yaml.safe_dump(_kubeconfig(f"https://127.0.0.1:{port}")))
    with ExitStack() as stack:
        address = f"http://127.0.0.1:{etcd}"
        urls = {"listen-client-urls": address, "advertise-client-urls": address}
        peer = f"http://127.0.0.1:{peers}"
        _start(stack, folder, "etcd", {"data-dir": folder / "etcd", "listen-peer-urls": peer, **urls})
        settings = {
            "etcd-servers": address,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": port,
            "cert-dir": folder / "certificates",
            "token-auth-file": tokens,
            "authorization-mode": "RBAC",
            "service-cluster-ip-range": "10.0.0.0/24",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": key,
            "service-account-signing-key-file": key,
            # No controller creates service accounts here.
            "disable-admission-plugins": "ServiceAccount",
        }
        _wait_for(_start(stack, folder, "kube-apiserver", settings), f"https://127.0.0.1:{port}/readyz", folder)
        yield kubeconfig


def _start(stack: ExitStack, folder: Path, name: str, settings: dict[str, object]) -> subprocess.Popen[bytes]:
    command = [str(ASSETS / name), *(f"--{key}={value}" for key, value in settings.items())]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _wait_for(process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
    pool = urllib3.PoolManager(cert_reqs="CERT_NONE", assert_hostname=False, retries=False)
    urllib3.disable_warnings()
    headers = {"Authorization": f"Bearer {_TOKEN}"}
    deadline = time.monotonic() + _STARTS_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if pool.request("GET", url, headers=headers, timeout=2.0).status == 200:
                return
        except urllib3.exceptions.HTTPError:
            pass
        time.sleep(0.2)
    log = (folder / "kube-apiserver.log").read_text(errors="replace")
    raise AssertionError(f"the API server is not ready: {log[-2000:]}")


def _kubeconfig(server: str) -> dict[str, object]:
    context, cluster = {"cluster": "test", "user": "test"}, {"server": server, "insecure-skip-tls-verify": True}
    named = {
        "contexts": [{"name": "test", "context": context}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": _TOKEN}}],
    }
    return {"apiVersion": "v1", "kind": "Config", "current-context": "test", **named}
