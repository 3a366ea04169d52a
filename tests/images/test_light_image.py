"""The light image, built from Debian's packages and the lock; test_graph_in_containers.py runs stages in it."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from components.shared import lineage
from tests.images import engine
from tests.images.engine import Image

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


def test_the_code_is_that_of_the_image(light: Image, tmp_path: Path) -> None:
    """A module of the same name in the working folder is not taken for the image's."""
    tmp_path.chmod(0o777)
    (tmp_path / "components").mkdir()
    (tmp_path / "components/__init__.py").write_text("raise SystemExit('the wrong one')\n")
    code = "import components; print(components.__file__)"
    assert light.run("python3", "-c", code, folder=tmp_path) == "/opt/grpo-pipeline/components/__init__.py\n"


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
