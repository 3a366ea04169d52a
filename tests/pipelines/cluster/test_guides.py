"""The commands of the guides: what works without a cluster is run, the rest is held against kubectl's own help."""

import os
import re
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

from components.preflight.config import load_params
from tests.k8s.rendered import ROOT, render, require_kubectl
from tests.k8s.test_manifests import faults

pytestmark = pytest.mark.slow
GUIDES = (*sorted(path.stem for path in (ROOT / "docs/how-to").glob("kube*.md")), "cluster-check", "troubleshooting")
_PRELUDE = r"""set -euo pipefail
for program in docker kind grpo-pipeline; do eval "$program() { :; }"; done
podman() { echo "docker.io/library/python@sha256:$(printf '0%.0s' {1..64})"; }
make() { echo "IMAGE_REGISTRY=registry.example.com/ml IMAGE_TAG=0123456789ab"; }
kubectl() {
  printf '%s\x1f' "$PWD" "$@" >> "$CALLS"; printf '\x1e' >> "$CALLS"
  case "$*" in
    "create secret "*) command kubectl "$@" --dry-run=client -o name ;;
    "kustomize "*) command kubectl "$@" > /dev/null ;;
  esac
}
"""
"""Stand-ins for programs: kubectl writes down its folder and arguments, and does what needs no cluster."""
_HEAD = """apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../k8s/overlays/multi-user]
"""


def blocks(guide: str, language: str) -> list[str]:
    """The blocks of a guide in a language."""
    text = (ROOT / "docs/how-to" / f"{guide}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def link_checkout(folder: Path) -> None:
    """Put what the guides name into a folder."""
    for name in ("k8s", "params", "params.yaml", "docs"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module", params=GUIDES)
def calls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Folder and arguments of every call of kubectl in a guide, whose blocks were run one after the other."""
    require_kubectl()
    clone = tmp_path_factory.mktemp(request.param)
    link_checkout(clone)
    script, log = "\n".join([_PRELUDE, *blocks(request.param, "bash"), "wait"]), clone.with_name(f"{clone.name}-calls")
    log.touch()
    environment = {**os.environ, "CALLS": str(log)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [call.split("\x1f")[:-1] for call in log.read_text().split("\x1e")[:-1]]


def test_kubectl_knows_every_option(calls: list[list[str]]) -> None:
    """By its own help, for the command in question."""
    for _, *arguments in calls:
        words = {"create": 3 if arguments[1] == "secret" else 2, "auth": 2}.get(arguments[0], 1)
        known = _help(*arguments[:words])
        for option in (each.partition("=")[0] for each in arguments if each.startswith("--")):
            assert re.search(rf"^\s+(-\w, )?{re.escape(option)}\b", known, re.MULTILINE), arguments


def test_what_is_applied_from_here_is_valid(calls: list[list[str]]) -> None:
    """Folders that are named exist and render, with nothing unknown; the rest comes from where it is published."""
    published = ("github.com/kubeflow/", "https://github.com/kubernetes-sigs/")
    for folder, *arguments in calls:
        if arguments[0] == "apply" and not arguments[-1].startswith(published):
            documents = render(Path(folder, arguments[-1]).resolve())
            assert documents
            assert [faults(document) for document in documents] == [[]] * len(documents)


@pytest.mark.parametrize("guide", GUIDES)
def test_yaml_in_a_guide_is_valid(guide: str, tmp_path: Path) -> None:
    """A params file is loaded; any other example is tried in a kustomization on top of an overlay."""
    link_checkout(tmp_path)
    for number, example in enumerate(blocks(guide, "yaml")):
        if "extends:" in example:
            (tmp_path / "example.yaml").write_text(example)
            load_params(tmp_path / "example.yaml")
            continue
        site = tmp_path / f"site-{number}"
        site.mkdir()
        (site / "kustomization.yaml").write_text(f"{_HEAD}{example}")
        assert [faults(document) for document in render(site)]


@lru_cache
def _help(*verb: str) -> str:
    """Return what kubectl says of a command and of all commands."""
    commands = (["kubectl", *verb, "--help"], ["kubectl", "options"])
    return "\n".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in commands)
