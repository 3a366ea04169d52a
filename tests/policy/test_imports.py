"""Processes of training import no libraries that they do not use."""

import importlib
import subprocess
import sys

import pytest

from components.shared.imports import without_packages


def test_training_imports_no_libraries_that_it_does_not_use() -> None:
    """Scikit-learn, pandas, PyArrow and MLflow would take two seconds and 150 MB of each process."""
    code = (
        "import sys\n"
        "import components.evaluate.worker, components.train_sft.worker, components.train_grpo.worker\n"
        "from components.policy.engine import import_deepspeed\n"
        "import_deepspeed()\n"
        "print('imported', *sorted({'sklearn', 'pandas', 'pyarrow', 'mlflow'} & sys.modules.keys()))\n"
        "import sklearn.metrics, mlflow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "imported"


def test_a_package_is_hidden_in_the_block_alone() -> None:
    """One that was imported before stays, and is found in the block too."""
    json = sys.modules["json"]
    sys.modules.pop("wave", None)
    with without_packages("wave", "json"):
        assert importlib.import_module("json") is json
        with pytest.raises(ImportError, match="wave"):
            importlib.import_module("wave")
    assert sys.modules["json"] is json
    assert importlib.import_module("wave").__name__ == "wave"
