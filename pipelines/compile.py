"""The graph as the document that Kubeflow Pipelines takes."""

import logging
from pathlib import Path

from kfp import compiler

from pipelines.grpo_post_training import grpo_post_training


def write(path: Path) -> None:
    """Write the compiled graph: equal code, params and image tag give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("kfp").setLevel(logging.ERROR)
    compiler.Compiler().compile(grpo_post_training, str(path))
