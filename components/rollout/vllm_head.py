"""A part of vLLM's models on CPUs that new weights do not reach by themselves."""

from typing import Any


def renew_head(model: Any) -> None:
    """Have an output layer that shares the weights of the embeddings compute with the new ones.

    On CPUs it keeps a repacked copy of them, which is not made again when weights are loaded. Some models, such as
    Gemma, have no output layer beside the embeddings, whose copy is.
    """
    head = getattr(model, "lm_head", None)
    if model.config.tie_word_embeddings and head is not None:
        head.quant_method.process_weights_after_loading(head)
