"""The graph as the documents that Kubeflow Pipelines takes."""

import itertools
import logging
from pathlib import Path
from typing import Any

from kfp import compiler

from pipelines.grpo_post_training import grpo_post_training
from pipelines.grpo_post_training_on_cluster import grpo_post_training_minimal, grpo_post_training_on_cluster

VARIANTS = {
    "grpo_post_training": grpo_post_training,
    "grpo_post_training_on_cluster": grpo_post_training_on_cluster,
    "grpo_post_training_minimal": grpo_post_training_minimal,
}
"""By the name of the file: training in its own task, as training jobs, and as training jobs with a short form."""
_HEADER = "# Compiled from pipelines/ and params.yaml by `make compile`; not to be edited.\n"


def write_all(folder: Path) -> list[Path]:
    """Write every variant into a folder and return the files."""
    paths = {folder / f"{name}.yaml": pipeline for name, pipeline in VARIANTS.items()}
    for path, pipeline in paths.items():
        write(path, pipeline)
    return list(paths)


def write(path: Path, pipeline: Any = grpo_post_training_on_cluster) -> None:
    """Write a compiled graph: equal code, params and images give equal bytes.

    There are two documents in a file where there are settings of Kubernetes; Kubeflow needs both.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("kfp").setLevel(logging.ERROR)
    compiler.Compiler().compile(pipeline, str(path))
    # KFP begins with a comment that repeats the defaults, in another order each time.
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    document = itertools.dropwhile(lambda line: line.startswith("#"), lines)
    path.write_text(_HEADER + "".join(document), encoding="utf-8")
