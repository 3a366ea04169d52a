"""Processes of training import no libraries that they do not use."""

import subprocess
import sys

import pytest


@pytest.mark.slow
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
