"""Which models can be trained here: all layers attend as usual, and the logits are those of the output layer.

Each model is tried out when it is loaded: what it samples would otherwise not be what is scored in training.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from components.policy.attention import PackedLayout
from components.policy.logprobs import LogprobModel, completion_logprobs, use_float32_logits
from components.policy.packing import MicroBatch, TokenSequence, pack
from components.shared.errors import PipelineError
from components.shared.model import require_attention_layers

_PROBE_LENGTHS = ((7, (4, 6, 5)), (5, (3, 6)))
"""Tokens of each probe prompt, and of its completions."""
_TOLERANCE = 1e-3
"""Of log-probabilities, in nats and relative: in float32 two kernels differ by at most 1e-5."""
_TOLERANCE_BF16 = 1e-1
"""In bfloat16 each layer rounds to 2^-9 of a value: the two kernels differ in the third digit of the hidden states, and
logits of some tens of nats in their tenths. Smaller leaks between completions are found by `_require_isolation`."""


def require_supported_layers(config: PreTrainedConfig, *, name: str) -> None:
    """Raise PipelineError if a config names a type of layer that is not attention over all tokens or a window of them.

    All completions lie in one row, and only attention knows which tokens belong together. Configs that name no types
    are left to `require_supported_model`.
    """
    text: Any = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    require_attention_layers(types, name=name)


@torch.no_grad()
def require_supported_model(model: PreTrainedModel) -> None:
    """Raise PipelineError if the model's own log-probabilities are not those that are trained on.

    Some families rescale or cap their logits (Gemma, Cohere, Granite), attend by rules of their own, or connect tokens
    without attention.
    """
    use_float32_logits(model.get_output_embeddings())
    # Random tokens: no prompt and no completion ends as another does, as far as the vocabulary allows. A layer that
    # takes a token from the row before it, and not from the token's own sequence, takes another one then.
    ids = partial(random.Random(0).choices, range(len(model.get_output_embeddings().weight)))
    prompts = [(tuple(ids(k=length)), lengths) for length, lengths in _PROBE_LENGTHS]
    sequences = [TokenSequence(prompt, tuple(ids(k=length))) for prompt, lengths in prompts for length in lengths]
    expected_M = torch.cat([_unpacked_logprobs(model, sequence) for sequence in sequences]).double()
    (batch,) = pack(sequences, max_tokens=10**9, device=model.device)
    layout = _RecordingLayout(batch.layout.own, batch.layout.shared, batch.layout.longest)
    packed = LogprobModel(model, temperature=1.0)
    logprobs_M = completion_logprobs(packed, [replace(batch, layout=layout)], len(expected_M))
    _require_attention_in_order(model, layout.layers)
    _require_isolation(packed, batch)
    tolerance = _TOLERANCE_BF16 if model.dtype == torch.bfloat16 else _TOLERANCE
    if not torch.allclose(logprobs_M, expected_M, rtol=tolerance, atol=tolerance):
        raise _unusual(model)


def _unpacked_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    """Return the model's own log-probabilities of a completion; PipelineError if its output layer is not the last."""
    outputs: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _layer, _inputs, output: outputs.append(output))
    ids_S = torch.tensor((*sequence.prompt_ids, *sequence.completion_ids), device=model.device)
    logits_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
    hook.remove()
    # To the last bit: a cap that does nothing to the small logits of these tokens would do something to larger ones.
    if len(outputs) != 1 or not torch.equal(outputs[0].flatten(), logits_SV.flatten()):
        raise _unusual(model)
    first = len(sequence.prompt_ids)
    logprobs_SV = logits_SV[first - 1 : -1].float().log_softmax(-1)
    logprobs_S: Tensor = logprobs_SV.gather(1, ids_S[first:, None]).squeeze(1)
    return logprobs_S


def _unusual(model: PreTrainedModel) -> PipelineError:
    name = type(model).__name__
    return PipelineError(f"{name} has no standard attention and output layer, which training requires")


@dataclass(frozen=True)
class _RecordingLayout(PackedLayout):
    """A layout that records the layers that attend by it."""

    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        return super().attend(layer, q_THD, k_TKD, v_TKD, scale)


def _require_attention_in_order(model: PreTrainedModel, attended: Sequence[int]) -> None:
    """Require that each layer attends by the layout, once, in the order of the layers: samplers keep keys by layer."""
    config: Any = model.config.get_text_config(decoder=True)
    if attended != list(range(config.num_hidden_layers)):
        stack = next((each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList)), ())
        others = [layer for number, layer in enumerate(stack) if attended.count(number) != 1]
        kinds = ", ".join(sorted({type(layer).__name__ for layer in others or stack}))
        raise PipelineError(
            f"{type(model).__name__} has layers ({kinds}) that do not attend exactly once each through transformers' "
            "attention interface, which training requires"
        )


def _require_isolation(model: LogprobModel, batch: MicroBatch) -> None:
    """Require that no completion is computed from another: NaNs in one must not reach any other.

    They pass through whatever connects two tokens, however small its weight, and through nothing else.
    """
    num_prompts = len(batch.layout.shared.key_bounds) - 1
    first = torch.arange(*batch.layout.own.query_bounds[num_prompts : num_prompts + 2], device=batch.source_N.device)
    hook = model.model.get_input_embeddings().register_forward_hook(
        lambda _layer, _inputs, embedded_1TD: embedded_1TD.index_fill(1, first, torch.nan)
    )
    logprobs_N = model(batch).logprobs_N
    hook.remove()
    if not torch.equal(logprobs_N.isnan(), torch.isin(batch.source_N, first)):
        raise PipelineError(
            f"{type(model.model).__name__} mixes tokens outside attention (such as by a convolution or a "
            "recurrence): completions of the same prompt would affect one another"
        )
