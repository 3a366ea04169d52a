"""What a pod that only submits and watches a training job needs."""

import subprocess
import sys

import pytest

_HEAVY = ("torch", "transformers", "deepspeed", "vllm", "safetensors", "tokenizers")


@pytest.mark.parametrize(
    "module",
    [
        "components.train_sft.train",
        "components.train_grpo.train",
        "components.cluster.task",
        "components.cluster.trainjob",
        "components.cluster.reaper",
    ],
)
def test_importing_is_light(module: str) -> None:
    """None of the libraries that only the ranks have."""
    program = f"import sys, {module}; print([name for name in {_HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
