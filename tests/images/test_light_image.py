"""The light image, built from Debian's packages and the lock, and its stages run in it as a cluster would."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from components.report.config import ReportConfig
from components.report.report import STAGE
from components.shared import lineage
from components.shared.lineage import digest
from components.shared.stage import run
from tests.images import engine
from tests.images.engine import ANYBODY, Image
from tests.presets import preset
from tests.report.synthetic import made_by_grpo, make_run, report_on, write_artifacts

pytestmark = [pytest.mark.long(minutes=0.6), pytest.mark.timeout(1200)]

LIGHT = [
    *("components.preflight.preflight", "components.prepare_data.prepare"),
    *("components.validate_data.validate", "components.report.report", "components.register.register"),
    *("components.train_sft.train", "components.train_grpo.train", "components.cluster.reaper"),
    "components.cluster.collector",
    *(f"components.shared.{path.stem}" for path in sorted((engine.ROOT / "components/shared").glob("[!_]*.py"))),
    *("kfp.dsl.executor_main", "kubernetes", "model_registry"),
]
"""What light tasks run, among them what submits training and clears it away."""
LIGHT_MB = 1400
"""More than it takes; what makes it larger should be meant."""


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    """IMAGE_REGISTRY and IMAGE_TAG of the light image, as built here."""
    engine.require()
    return engine.build("--only", "light")


@pytest.fixture(scope="module")
def light(variables: Mapping[str, str]) -> Image:
    """The light image."""
    return Image(f"{variables['IMAGE_REGISTRY']}/grpo-pipeline/python-light:{variables['IMAGE_TAG']}")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A working folder that everybody may write to, with a params file: the smoke preset with a gate that passes."""
    params = preset()
    params["report"]["gate"] |= {"target": ["words"], "enforce": True, "margin": 0.5}
    params["prepare_data"]["sources"][0] |= {"num_train": 120, "num_test": 60}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    tmp_path.chmod(0o777)
    yield tmp_path
    # What a container has made may belong to others.
    subprocess.run(["chmod", "-R", "u+rwX", str(tmp_path)], check=True)


def _stage(name: str, **folders: Path) -> list[str]:
    options = [part for key, path in folders.items() for part in (f"--{key.replace('_', '-')}", str(path))]
    return ["python3", "-m", f"components.{name}", *options]


def test_data_are_prepared_and_validated(light: Image, folder: Path) -> None:
    """Both stages run with a read-only root, no network and any user, and make what they make outside."""
    problems, outside, validation = folder / "problems", folder / "outside", folder / "validation"
    light.run(*_stage("prepare_data", problems=problems), folder=folder, user=ANYBODY)
    light.run(*_stage("validate_data", problems=problems, validation=validation), folder=folder, user=ANYBODY)
    command = [sys.executable, *_stage("prepare_data", problems=outside)[1:], "--params", str(folder / "params.yaml")]
    subprocess.run(command, cwd=engine.ROOT, check=True, capture_output=True)
    assert digest(problems) == digest(outside)
    assert json.loads((validation / "result.json").read_text())["success"] is True


def test_a_policy_is_reported_and_registered(light: Image, folder: Path) -> None:
    """The gate is decided as outside, and a version is made with git and DVC, which names the image's revision."""
    inputs = make_run(folder / "run")
    light.run(*_stage("report", **inputs, report=folder / "report"), folder=folder, user=ANYBODY)
    config = ReportConfig.model_validate(yaml.safe_load((folder / "params.yaml").read_text())["report"])
    run(STAGE, config, {**inputs, "report": folder / "outside"})
    assert digest(folder / "report") == digest(folder / "outside")
    policy = folder / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"weights")
    lineage.write(policy, made_by_grpo())
    registration = folder / "registration"
    made = {"policy": policy, **write_artifacts(policy), "report": report_on(folder / "report", policy)}
    stage = _stage("register", **made, registration=registration)
    light.run(*stage, folder=folder, user=ANYBODY)
    assert json.loads((registration / "version.json").read_text())["version"] == "v0.0.1"


def test_it_has_what_light_code_imports_and_nothing_heavy(light: Image) -> None:
    """Every module of light code, the clients of the cluster and KFP's executor are there; torch and vLLM are not."""
    light.modules(*LIGHT)
    code = "from importlib.util import find_spec\n"
    code += "print([name for name in ('torch', 'vllm', 'deepspeed') if find_spec(name)])"
    assert light.run("python3", "-c", code).splitlines()[-1] == "[]"


def test_its_packages_are_compatible(light: Image) -> None:
    """No package asks for another one, or another version, than what is there, and the loader finds all libraries."""
    assert light.unmet_requirements() == []
    assert light.missing_libraries() == "{}"


def test_the_code_is_that_of_the_image(light: Image, folder: Path) -> None:
    """A module of the same name in the working folder is not taken for the image's."""
    (folder / "components").mkdir()
    (folder / "components/__init__.py").write_text("raise SystemExit('the wrong one')\n")
    code = "import components; print(components.__file__)"
    assert light.run("python3", "-c", code, folder=folder) == "/opt/grpo-pipeline/components/__init__.py\n"


def test_its_labels(light: Image, variables: Mapping[str, str]) -> None:
    """Labels name revision, version and base; the revision is that of the tag."""
    labels = json.loads(engine.podman("image", "inspect", "--format", "{{json .Labels}}", light.name))
    values = {key.removeprefix("org.opencontainers.image."): value for key, value in labels.items()}
    revision = variables["IMAGE_TAG"].removesuffix("-cpu")
    assert (values["revision"], values["version"]) == (revision, "0.1.0")
    assert values["base.name"].removeprefix("sha256:") == engine.base_image().removeprefix("sha256:")
    told = light.run("sh", "-c", "echo $GRPO_PIPELINE_REVISION $GRPO_PIPELINE_LOCK").split()
    assert told == [revision, lineage.file_digest(engine.ROOT / "requirements.lock")]


def test_its_layers_are_few_and_the_code_is_the_last(light: Image) -> None:
    """System, packages, code: a new revision is a layer of less than 5 MB on top of what nodes have already."""
    layers = engine.sizes(light.name)
    assert sum(size for size, _ in layers) < LIGHT_MB * 1e6, layers
    assert "COPY" in layers[-1][1]
    assert layers[-1][0] < 5e6
    assert len(layers) <= 5
