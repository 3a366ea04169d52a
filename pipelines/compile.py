"""The graph as the document that Kubeflow Pipelines takes."""

import itertools
import logging
from pathlib import Path

from kfp import compiler

from pipelines.grpo_post_training import grpo_post_training

_HEADER = "# Compiled from pipelines/grpo_post_training.py and params.yaml by `make compile`; not to be edited.\n"


def write(path: Path) -> None:
    """Write the compiled graph: equal code, params and image tag give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("kfp").setLevel(logging.ERROR)
    compiler.Compiler().compile(grpo_post_training, str(path))
    # KFP begins with a comment that repeats the defaults, in another order each time.
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    document = itertools.dropwhile(lambda line: line.startswith("#"), lines)
    path.write_text(_HEADER + "".join(document), encoding="utf-8")
