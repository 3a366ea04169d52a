"""Build the container images: `python3 -m images.build --base NAME@sha256:...`; see `make images`.

Needs nothing but Python, git, and podman or docker. Prints the two variables with which the graph names these images.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from images.packages import pip_setting

ROOT = Path(__file__).parents[1]
BAKED = (".dockerignore", "components", "images", "pyproject.toml", "requirements.lock", "requirements-cuda.lock")
"""What decides what is in an image."""
_PINNED = re.compile(r"(?:\S+@)?sha256:[0-9a-f]{64}|[0-9a-f]{64}")
_REVISION_DIGITS = 12


class BuildError(Exception):
    """What the person who builds can correct."""


def main() -> int:
    """Build the images that are asked for; print a BuildError in one line and return 2."""
    options = _parser().parse_args()
    try:
        tag = build(options, engine())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"IMAGE_REGISTRY={options.registry} IMAGE_TAG={tag}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="images.build", description="Build the container images of the stages.")
    parser.add_argument("--only", choices=["light", "gpu"], help="one of the images (default: both)")
    parser.add_argument("--base", default="", help="Debian image with Python: NAME@sha256:... or a local id")
    parser.add_argument("--variant", choices=["cuda", "cpu"], default="cuda", help="of torch (default: %(default)s)")
    parser.add_argument("--registry", default="localhost", help="what names begin with (default: %(default)s)")
    parser.add_argument("--push", action="store_true", help="push them, with the engine's credentials")
    return parser


def build(options: argparse.Namespace, engine: str) -> str:
    """Build, tag and perhaps push the images, the light one's dependencies first; return the tag."""
    base = pinned(options.base)
    built_from = revision(ROOT)
    lock = hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    tag = f"{built_from}-cpu" if options.variant == "cpu" else built_from
    prefix = f"{options.registry}/grpo-pipeline"
    arguments = {"light": {"BASE": base}}
    images = [options.only] if options.only else ["light", "gpu"]
    if "gpu" in images:
        # Without labels, which change with each commit: what is built on it would change with them.
        dependencies = f"{prefix}/python-dependencies:{tag}"
        _build(engine, "light", "dependencies", dependencies, _pairs("--build-arg", arguments["light"]))
        arguments["gpu"] = {"DEPENDENCIES": dependencies, "VARIANT": options.variant}
    for image in images:
        name = f"{prefix}/python-{image}:{tag}"
        used = _pairs("--build-arg", {**arguments[image], "REVISION": built_from, "LOCK": lock})
        _build(engine, image, image, name, [*used, *labels(built_from, base)])
        if options.push and subprocess.run([engine, "push", name], stdout=sys.stderr, check=False).returncode:
            raise BuildError(f"{name} could not be pushed; see above. Log in with `{engine} login {options.registry}`")
        print(name, flush=True)
    return tag


def engine() -> str:
    """What builds: $CONTAINER_ENGINE, or the first of podman and docker that is here and works."""
    chosen = os.environ.get("CONTAINER_ENGINE")
    for name in [chosen] if chosen else ["podman", "docker"]:
        if shutil.which(name) and not subprocess.run([name, "info"], capture_output=True, check=False).returncode:
            return name
    missing = f"{chosen} (CONTAINER_ENGINE)" if chosen else "podman or docker"
    raise BuildError(f"{missing} is needed, and `info` of it has to work: install it, or start its service")


def pinned(base: str) -> str:
    """Return a base image's reference if it is immutable; raise BuildError otherwise."""
    if not base:
        raise BuildError(
            "BASE is needed: a Debian image with Python 3.11 or newer by digest, such as "
            "BASE=docker.io/library/python@sha256:...; without a registry: BASE=$(images/base.sh)"
        )
    if not _PINNED.fullmatch(base):
        raise BuildError(
            f"BASE={base} is a mutable reference; give a digest (NAME@sha256:...) or the id of a local image"
        )
    return base


def revision(root: Path) -> str:
    """Return the git revision of what goes into the images; with a digest of their content where it is uncommitted."""
    head = _git(root, "rev-parse", "HEAD").strip()
    if not _git(root, "status", "--porcelain", "--", *BAKED).strip():
        return head
    content = hashlib.sha256()
    listing = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *BAKED)
    for path in sorted({root / name for name in listing.split("\0") if name}):
        if path.is_file():
            content.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"{head}-dirty-{content.hexdigest()[:_REVISION_DIGITS]}"


def source(root: Path) -> str:
    """Return where the repository is published, without the credentials that a remote's address may hold."""
    remote = _git(root, "config", "--default", "", "--get", "remote.origin.url").strip()
    return re.sub(r"//[^/@]*@", "//", remote) if "://" in remote and not remote.startswith("file:") else ""


def labels(revision: str, base: str) -> list[str]:
    """Return what is only known when an image is built, as options; the time is the commit's, not the build's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, _, digest = base.partition("@")
    values = {
        "revision": revision,
        "created": _git(ROOT, "log", "-1", "--format=%cI").strip(),
        "version": project["version"],
        "source": source(ROOT),
        "base.name": name,
        "base.digest": digest,
    }
    return _pairs("--label", {f"org.opencontainers.image.{key}": value for key, value in values.items() if value})


def mounts() -> list[str]:
    """Return the options that give a build the certificates and wheels that pip uses on this machine."""
    certificates = os.environ.get("SSL_CERT_FILE") or os.environ.get("PIP_CERT")
    folders = [Path(place) for place in pip_setting("find-links").split() if Path(place).is_absolute()]
    wheels = next((folder for folder in folders if any(folder.glob("torch-*.whl"))), None)
    options = ["--secret", f"id=certificates,src={certificates}"] if certificates else []
    return [*options, *(["--build-context", f"wheels={wheels}"] if wheels else [])]


def _pairs(option: str, values: dict[str, str]) -> list[str]:
    return [part for key, value in values.items() for part in (option, f"{key}={value}")]


def _build(engine: str, image: str, stage: str, name: str, arguments: list[str]) -> None:
    file = f"images/{image}/Containerfile"
    command = [engine, "build", "--file", file, "--target", stage, "--tag", name, *mounts(), *arguments, "."]
    # What the engine says is for people; names of images are all that comes out on standard output.
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    if subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode:
        raise BuildError(f"{name} could not be built from {file}; see above")


def _git(root: Path, *arguments: str) -> str:
    ended = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BuildError(f"git {arguments[0]}: {ended.stderr.strip()}; images are named after the git revision")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
