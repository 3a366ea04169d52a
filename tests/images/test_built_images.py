"""Both images, built from Debian's packages and the lock for processors, as a cluster would run them."""

import json
import shutil
from pathlib import Path

import pytest

from components.shared import lineage
from tests.images import engine
from tests.images.engine import ANYBODY, Image

pytestmark = [pytest.mark.long(minutes=3), pytest.mark.timeout(3600)]

MODULES = {
    "light": [
        *("components.preflight.preflight", "components.prepare_data.prepare", "components.validate_data.validate"),
        *("components.report.report", "components.register.register", "components.train_sft.train"),
        *("components.train_grpo.train", "components.cluster.reaper", "components.cluster.collector"),
        *(f"components.shared.{path.stem}" for path in sorted((engine.ROOT / "components/shared").glob("[!_]*.py"))),
        *("kfp.dsl.executor_main", "kubernetes", "model_registry"),
    ],
    "gpu": [
        *("torch", "deepspeed", "vllm", "peft", "components.cluster.rank", "components.evaluate.worker"),
        *("components.train_grpo.trainer", "components.rollout.vllm.worker", "kfp.dsl.executor_main"),
    ],
}
UNMET = """
from importlib.metadata import PackageNotFoundError, distributions, version
from packaging.requirements import Requirement
for package in distributions():
    for needed in map(Requirement, package.requires or []):
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            met = needed.specifier.contains(version(needed.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            print(f"{needed.name}: {package.name} asks for {needed}")
"""
"""Prints each requirement of an installed package that is not met."""
LEFT_OUT = {"light": set[str](), "gpu": {"torchaudio", "torchcodec", "torchvision", "triton", "intel-cmplr-lib-ur"}}
"""What vLLM and torch ask for without a need on a processor: pictures, sound, GPUs."""
MOST_MB = {"light": 1400, "gpu": 4200}
"""More than each takes; what makes it larger should be meant."""


@pytest.fixture(scope="module", params=MODULES)
def image(request: pytest.FixtureRequest) -> Image:
    """One of the images."""
    engine.require()
    return engine.build("--only", request.param)[request.param]


def test_its_code_can_be_imported(image: Image, tmp_path: Path) -> None:
    """By anybody, and the light image has no library for models; code in the working folder is not taken for it."""
    code = f"import importlib\nfor name in {MODULES[image.kind]!r}: importlib.import_module(name)"
    image.run("python3", "-c", code, user=ANYBODY)
    tmp_path.chmod(0o777)
    (tmp_path / "components").mkdir()
    (tmp_path / "components/__init__.py").write_text("raise SystemExit('the wrong one')\n")
    code = "import components; from importlib.util import find_spec\n"
    code += "print(components.__file__, *filter(find_spec, ('torch', 'deepspeed', 'vllm')))"
    models = " torch deepspeed vllm" if image.kind == "gpu" else ""
    printed = image.run("python3", "-c", code, folder=tmp_path).splitlines()[-1]
    assert printed == f"/opt/grpo-pipeline/components/__init__.py{models}"


def test_its_packages_are_compatible(image: Image) -> None:
    """The loader finds all libraries, and no package asks for what is not there, but for what is left out."""
    assert image.run("python3", "-m", "components.shared.libraries").strip() == "{}"
    complaints = image.run("python3", "-c", UNMET).splitlines()
    assert {line.partition(":")[0] for line in complaints} <= LEFT_OUT[image.kind], complaints


def test_its_labels(image: Image) -> None:
    """Labels name revision, version and base; the revision is that of the tag."""
    labels = json.loads(engine.podman("image", "inspect", "--format", "{{json .Labels}}", image.name))
    values = {key.removeprefix("org.opencontainers.image."): value for key, value in labels.items()}
    revision = image.name.rpartition(":")[2].removesuffix("-cpu")
    assert (values["revision"], values["version"]) == (revision, "0.1.0")
    assert values["base.name"].removeprefix("sha256:") == engine.base_image().removeprefix("sha256:")
    told = image.run("sh", "-c", "echo $GRPO_PIPELINE_REVISION $GRPO_PIPELINE_LOCK").split()
    assert told == [revision, lineage.file_digest(engine.ROOT / "requirements.lock")]


def test_its_layers_begin_with_those_of_the_light_image(image: Image) -> None:
    """System, packages, code: a new revision is a layer of less than 5 MB on top of what nodes have already."""
    light = engine.build("--only", "light")["light"].name
    layers, shared = engine.sizes(image.name), engine.sizes(light)[:-1]
    assert engine.diffs(image.name)[: len(shared)] == engine.diffs(light)[: len(shared)]
    assert len(shared) <= 4
    assert sum(size for size, _ in layers) < MOST_MB[image.kind] * 1e6, layers
    assert "COPY" in layers[-1][1]
    assert layers[-1][0] < 5e6


def test_vllm_samples_in_it_and_takes_weights(tmp_path: Path) -> None:
    """From each policy in turn, with the log-probabilities that its trainer computes."""
    engine.require()
    shutil.copytree(engine.ROOT / "tests", tmp_path / "tests")
    tmp_path.chmod(0o777)
    command = ["python3", "-m", "tests.rollout.vllm_processes", "engine", str(tmp_path)]
    path = f"PYTHONPATH=/opt/grpo-pipeline:{tmp_path}"
    printed = engine.build("--only", "gpu")["gpu"].run("env", path, *command, folder=tmp_path)
    differences = json.loads(printed.splitlines()[-1])
    assert len(differences) == 2
    assert max(differences) < 1e-4
