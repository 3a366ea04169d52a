"""The container images that the stages run in: one without torch, one with everything. `make images` builds them."""

import os

# The tag must name one build for good (a git revision): Kubeflow's cache looks at the reference, not at what is behind.
_TAG = os.environ.get("IMAGE_TAG", "dev")
# Without either, the name tells whoever meets it on a cluster what to do; no host can have it.
_NOWHERE = "" if "IMAGE_TAG" in os.environ else "use-grpo-pipeline-publish.invalid"
_REGISTRY = os.environ.get("IMAGE_REGISTRY", _NOWHERE).rstrip("/")
_PREFIX = f"{_REGISTRY}/grpo-pipeline" if _REGISTRY else "grpo-pipeline"

# "python" in the name tells KFP's local runner that the current interpreter can stand in for the image.
LIGHT = f"{_PREFIX}/python-light:{_TAG}"
"""Of stages that run no model, and of what submits training; images/light."""
GPU = f"{_PREFIX}/python-gpu:{_TAG}"
"""Of stages that run a model: torch, DeepSpeed, vLLM and transformers on top; images/gpu."""
