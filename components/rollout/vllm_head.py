"""A part of vLLM's models on CPUs that new weights do not reach by themselves."""

from typing import Any


def renew_head(model: Any) -> None:
    """Have an output layer that shares the weights of the embeddings compute with the new ones.

    On CPUs it keeps a repacked copy of them, which is not made again when weights are loaded.
    """
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
