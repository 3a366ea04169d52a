"""Where a reward model comes from: a sequence classifier with one label that reads the policy's tokens."""

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from components.policy.checkpoint import Checkpoint
from components.shared.errors import PipelineError
from components.shared.system_errors import out_of_memory

_EXPECTED = "the folder or hub id of a sequence classifier is expected, or `reference` to make one"


def load_classifier(base: str, reference: Checkpoint) -> PreTrainedModel:
    """Return the float32 classifier that `base` names, on the device of `reference`.

    `reference` makes one of the reference's layers and a head of zeros, by which every score is one half at first. Any
    other base is a checkpoint; PipelineError where it cannot be loaded, has no single score or has other tokens.
    """
    made = _copy(reference) if base == "reference" else _load(base, reference)
    placed: PreTrainedModel = made.to(reference.device)
    return placed


def _copy(reference: Checkpoint) -> PreTrainedModel:
    model = reference.model
    # Through a dictionary, which leaves behind how the reference computes its attention.
    config = type(model.config).from_dict({**model.config.to_diff_dict(), "num_labels": 1})
    try:
        # All the random weights are replaced: what is drawn after this must not depend on them.
        with torch.random.fork_rng(devices=[]):
            made = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError:
        raise PipelineError(
            f"{_name('reference')}: transformers has no sequence classifier like {type(model).__name__}; "
            "name a checkpoint of another family with the same tokenizer"
        ) from None
    made.base_model.load_state_dict(model.base_model.state_dict())
    nn.init.zeros_(made.score.weight)
    return made


def _load(base: str, reference: Checkpoint) -> PreTrainedModel:
    try:
        made, loading = AutoModelForSequenceClassification.from_pretrained(
            base, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if out_of_memory(error) is not None:
            raise
        reason = str(error).strip().split("\n", 1)[0]
        raise PipelineError(f"{_name(base)}: cannot be loaded ({reason}); {_EXPECTED}") from None
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"], reverse=True)
        raise PipelineError(f"{_name(base)}: lacks {len(missing)} of its weights, such as {missing[0]}; {_EXPECTED}")
    if made.config.num_labels != 1:
        raise PipelineError(f"{_name(base)}: has {made.config.num_labels} labels, 1 is expected")
    if not isinstance(getattr(made, "score", None), nn.Linear):
        raise PipelineError(f"{_name(base)}: {type(made).__name__} has no linear head `score`, as decoders have")
    if tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise PipelineError(f"{_name(base)}: its vocabulary is not the policy's, whose tokens it has to read")
    return made


def _name(base: str) -> str:
    return f"reward.model.base {base}"
