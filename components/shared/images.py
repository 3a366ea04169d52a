"""The container images that Kubeflow runs the stages in: one without torch, one with everything."""

import os

# The tag must name one build for good (a commit): Kubeflow's cache looks at the reference, not at what is behind it.
_TAG = os.environ.get("IMAGE_TAG", "dev")

# "python" in the name tells KFP's local runner that the current interpreter can stand in for the image.
LIGHT = f"grpo-pipeline/python-light:{_TAG}"
"""prepare_data, validate_data, report, register."""
GPU = f"grpo-pipeline/python-gpu:{_TAG}"
"""train_sft, train_grpo, evaluate: torch, DeepSpeed and transformers on top."""
