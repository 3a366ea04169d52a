"""The container images that the stages run in: one without torch, one with everything. `make images` builds them."""

import os

# The tag must never move to another build (a git revision): Kubeflow's cache compares references only.
_TAG = os.environ.get("IMAGE_TAG", "dev")
# Without both variables the name says what to do to people who see it on a cluster; no host can have it.
_NOWHERE = "" if "IMAGE_TAG" in os.environ else "use-grpo-pipeline-publish.invalid"
_REGISTRY = os.environ.get("IMAGE_REGISTRY", _NOWHERE).rstrip("/")
_PREFIX = f"{_REGISTRY}/grpo-pipeline" if _REGISTRY else "grpo-pipeline"

# "python" in the name tells KFP's local runner that the current interpreter can stand in for the image.
LIGHT = f"{_PREFIX}/python-light:{_TAG}"
"""Image of stages that run no model, and of tasks that submit training; images/light."""
GPU = f"{_PREFIX}/python-gpu:{_TAG}"
"""Image of stages that run a model: torch, DeepSpeed, vLLM and transformers as well; images/gpu."""
