"""The gpu image, in its build for processors, as a cluster would run it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.images import engine
from tests.images.engine import Image

pytestmark = [pytest.mark.long(minutes=3), pytest.mark.timeout(3600)]

LEFT_OUT = {"torchaudio", "torchcodec", "torchvision", "triton", "intel-cmplr-lib-ur"}
"""What vLLM and torch ask for without a need on a processor: pictures, sound, GPUs."""
GPU_MB = 4200
"""More than the build for processors takes; what makes it larger should be meant."""


@pytest.fixture(scope="module")
def gpu() -> Image:
    """The gpu image."""
    engine.require()
    variables = engine.build()
    return Image(f"{variables['IMAGE_REGISTRY']}/grpo-pipeline/python-gpu:{variables['IMAGE_TAG']}")


def test_it_has_what_runs_models(gpu: Image) -> None:
    """The step functions of the stages that run a model, and the engines under them, can be imported by anybody."""
    names = ["torch", "deepspeed", "vllm", "peft", "components.cluster.rank", "components.evaluate.worker"]
    names += ["components.train_grpo.trainer", "components.rollout.vllm.worker", "kfp.dsl.executor_main"]
    gpu.modules(*names)


def test_its_packages_are_compatible(gpu: Image) -> None:
    """No package asks for what is not there, but for what is left out on purpose; vLLM needs libnuma to start."""
    assert gpu.missing_libraries() == "{}"
    complaints = gpu.unmet_requirements()
    assert {line.partition(":")[0] for line in complaints} <= LEFT_OUT, complaints


def test_vllm_samples_in_it_and_takes_weights(gpu: Image, tmp_path: Path) -> None:
    """From each policy in turn, with the log-probabilities that its trainer computes."""
    tests = shutil.copytree(engine.ROOT / "tests/rollout", tmp_path / "tests/rollout").parent
    shutil.copy(engine.ROOT / "tests/tiny.py", tests)
    tmp_path.chmod(0o777)
    command = ["python3", "-m", "tests.rollout.vllm_processes", "engine", str(tmp_path)]
    printed = gpu.run("env", f"PYTHONPATH=/opt/grpo-pipeline:{tmp_path}", *command, folder=tmp_path)
    differences = json.loads(printed.splitlines()[-1])
    assert len(differences) == 2
    assert max(differences) < 1e-4


def test_its_layers_begin_with_those_of_the_light_image(gpu: Image) -> None:
    """A node that has one image pulls only what is different of the other; torch is a layer of its own."""
    light = Image(gpu.name.replace("python-gpu", "python-light"))
    layers, shared = engine.sizes(gpu.name), engine.sizes(light.name)[:-1]
    assert engine.diffs(gpu.name)[: len(shared)] == engine.diffs(light.name)[: len(shared)]
    assert sum(size for size, _ in layers) < GPU_MB * 1e6, layers
    assert layers[-1][0] < 5e6
