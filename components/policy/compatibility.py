"""Whether a model is trained in packed rows, for which all its layers must attend as usual, or in padded rows.

Each model is tried out when it is loaded: a mismatch would give completions other log-probabilities in training than
in sampling.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from components.policy.attention import PackedLayout
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.output_layer import use_float32_logits
from components.policy.packing import MicroBatch, TokenSequence, pack
from components.policy.padded import use_padded_rows
from components.shared.errors import PipelineError, is_failed_allocation

_LAYER_TYPES = {"attention", "full_attention", "sliding_attention"}
"""Names in transformers' configs of layers that can be packed, sliding ones within their window."""
_PROBE_LENGTHS = ((7, (4, 6, 5)), (5, (3, 6)))
"""For each group of probes, the tokens of the prompt and of each completion."""
_TOLERANCE = 1e-3
"""Absolute (in nats) and relative tolerance of log-probabilities: in float32 two kernels differ by at most 1e-5."""
_TOLERANCE_BF16 = 1e-1
"""The same in bfloat16, where each layer rounds to 2^-9 of a value: two kernels differ in the third digit of the hidden
states, so logits of some tens differ in their tenths. `_require_isolation` finds smaller leaks between completions."""


@torch.no_grad()
def prepare_model(model: PreTrainedModel) -> None:
    """Set a model up for packed rows if these are exact for it, else for padded ones; PipelineError if neither are."""
    attention = model.config._attn_implementation
    num_changes = [each._version for each in model.parameters()]
    try:
        require_packed_rows(model)
    except Exception as error:  # a model that knows no layouts may raise anything
        if is_failed_allocation(error):
            raise
        # Undo what `require_packed_rows` has set.
        model.set_attn_implementation(attention)
        vars(model.get_output_embeddings()).pop("forward", None)
        reason = str(error) if isinstance(error, PipelineError) else f"{type(model).__name__} takes no layout"
        _require_trainable_in_padded_rows(use_padded_rows(model, reason))
        if num_changes != [each._version for each in model.parameters()]:  # by RWKV, outside of training mode
            raise PipelineError(
                f"{type(model).__name__} cannot be trained here: it changes its weights as it reads"
            ) from None


def _probes(model: PreTrainedModel) -> list[TokenSequence]:
    """Return sequences of random tokens to try a model with; those of a group follow each other and share their prompt.

    Their last tokens differ, which reveals a layer that reads the preceding token of the row, not of the sequence.
    """
    vocabulary = range(len(model.get_input_embeddings().weight))
    draw = partial(random.Random(0).choices, vocabulary)
    groups = [(tuple(draw(k=prompt_length)), lengths) for prompt_length, lengths in _PROBE_LENGTHS]
    return [TokenSequence(prompt, tuple(draw(k=length))) for prompt, lengths in groups for length in lengths]


@torch.no_grad()
def require_packed_rows(model: PreTrainedModel) -> None:
    """Raise PipelineError if packed rows do not have the model's own log-probabilities; leave it set up for them.

    Some families rescale or cap their logits (Gemma, Cohere, Granite), attend by their own rules, or mix tokens outside
    attention.
    """
    config: Any = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if others := sorted({*map(str, types)} - _LAYER_TYPES):
        raise PipelineError(f"{type(model).__name__} has layers of type {', '.join(others)}")
    use_float32_logits(model.get_output_embeddings())
    sequences = _probes(model)
    expected_M = torch.cat([_unpacked_logprobs(model, sequence) for sequence in sequences]).double()
    (batch,) = pack(sequences, max_tokens=10**9, device=model.device)
    layout = _RecordingLayout(**vars(batch.layout))
    packed = LogprobModel(model, temperature=1.0)
    logprobs_M = completion_logprobs(packed, [replace(batch, layout=layout)], len(expected_M))
    _require_attention_in_order(model, layout.layers)
    _require_isolation(packed, batch)
    if not _are_close(model, logprobs_M, expected_M):
        raise _unusual_logits(model)


def _require_trainable_in_padded_rows(model: PreTrainedModel) -> None:
    """Raise PipelineError if a row's log-probabilities depend on other rows, later tokens or the use of a cache."""
    name, sequences = type(model).__name__, _probes(model)
    try:
        (batch,) = pack(sequences, max_tokens=10**9, device=model.device, padded=True)
        padded_M = completion_logprobs(LogprobModel(model, temperature=1.0), [batch], len(batch.token_N))
        prefix_M = torch.cat([_prefix_logprobs(model, sequence) for sequence in sequences]).double()
        is_causal, is_cache_exact = _is_causal(model, sequences[0]), _is_cache_exact(model, sequences[0])
    except Exception as error:  # any: the code of the model is not known
        if is_failed_allocation(error):
            raise
        raise PipelineError(f"{name} cannot be trained here: {' '.join(str(error).split())[:200]}") from None
    if not is_causal or not _are_close(model, padded_M, prefix_M):  # the second also finds effects of other rows
        raise PipelineError(f"{name} cannot be trained here: what it computes of a text depends on what follows it")
    if not is_cache_exact:
        raise PipelineError(f"{name} cannot be trained here: with its cache it computes other logits than without")


def _prefix_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    """Return the log-probabilities of a completion, each from a call with only the tokens before it."""
    ids = torch.tensor((*sequence.prompt_ids, *sequence.completion_ids), device=model.device)
    places = range(len(sequence.prompt_ids), len(ids))
    logits_SV = torch.stack([model(input_ids=ids[None, :place], use_cache=False).logits[0, -1] for place in places])
    logprobs_S: Tensor = logits_SV.float().log_softmax(-1).gather(1, ids[places.start :, None]).squeeze(1)
    return logprobs_S


def _is_causal(model: PreTrainedModel, sequence: TokenSequence) -> bool:
    """Tell whether later tokens leave the prompt's logits unchanged: the gradient by their embeddings is exactly 0."""
    embedded: list[Tensor] = []

    def embed(_layer: nn.Module, _inputs: object, output_1SD: Tensor) -> Tensor:
        embedded.append(output_1SD.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(embed)
    ids = torch.tensor((*sequence.prompt_ids, *sequence.completion_ids), device=model.device)
    with torch.enable_grad():
        prompt_logits_SV = model(input_ids=ids[None], use_cache=False).logits[0, : len(sequence.prompt_ids)]
        prompt_logits_SV.square().sum().backward()
    hook.remove()
    model.zero_grad()
    grad_1SD = embedded[0].grad
    return grad_1SD is not None and not grad_1SD[:, len(sequence.prompt_ids) :].any()


def _is_cache_exact(model: PreTrainedModel, sequence: TokenSequence) -> bool:
    """Tell whether decoding token by token with the model's cache gives the logits of one pass over all tokens."""
    ids_1S = torch.tensor([sequence.prompt_ids], device=model.device)
    decoded = model.generate(
        ids_1S,
        attention_mask=torch.ones_like(ids_1S),
        generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0),
        output_logits=True,
        return_dict_in_generate=True,
    )
    one_pass_1SV = model(input_ids=decoded.sequences[:, :-1], use_cache=False).logits
    one_pass_SV = one_pass_1SV[0, len(sequence.prompt_ids) - 1 :].float()
    decoded_SV = torch.cat(decoded.logits).float()
    return _are_close(model, decoded_SV.log_softmax(-1), one_pass_SV.log_softmax(-1))


def _are_close(model: PreTrainedModel, one_M: Tensor, other_M: Tensor) -> bool:
    tolerance = _TOLERANCE_BF16 if model.dtype == torch.bfloat16 else _TOLERANCE
    return torch.allclose(one_M, other_M, rtol=tolerance, atol=tolerance)


def _unpacked_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> Tensor:
    """Return the model's own log-probabilities of a completion; PipelineError if it changes its logits."""
    outputs: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _layer, _inputs, output: outputs.append(output))
    ids_S = torch.tensor((*sequence.prompt_ids, *sequence.completion_ids), device=model.device)
    logits_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
    hook.remove()
    # Bitwise equality: a cap that hardly changes the small logits of these tokens would change larger ones.
    if len(outputs) != 1 or not torch.equal(outputs[0].flatten(), logits_SV.flatten()):
        raise _unusual_logits(model)
    first = len(sequence.prompt_ids)
    logprobs_SV = logits_SV[first - 1 : -1].float().log_softmax(-1)
    logprobs_S: Tensor = logprobs_SV.gather(1, ids_S[first:, None]).squeeze(1)
    return logprobs_S


def _unusual_logits(model: PreTrainedModel) -> PipelineError:
    return PipelineError(f"{type(model).__name__} rescales or caps its logits, or attends by rules of its own")


@dataclass(frozen=True)
class _RecordingLayout(PackedLayout):
    """A layout that records which layers call its `attend`, in order."""

    layers: list[int] = field(default_factory=list)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float) -> Tensor:
        self.layers.append(layer)
        return super().attend(layer, q_THD, k_TKD, v_TKD, scale)


def _require_attention_in_order(model: PreTrainedModel, attended: Sequence[int]) -> None:
    """Raise PipelineError unless every layer attended once, in order: samplers keep keys and values by layer."""
    config: Any = model.config.get_text_config(decoder=True)
    if attended == list(range(config.num_hidden_layers)):
        return
    layers = next((each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList)), ())
    wrong = [layer for number, layer in enumerate(layers) if attended.count(number) != 1]
    classes = ", ".join(sorted({type(layer).__name__ for layer in wrong or layers}))
    raise PipelineError(
        f"{type(model).__name__} has layers ({classes}) that do not attend exactly once each through transformers' "
        "attention interface"
    )


def _require_isolation(model: LogprobModel, batch: MicroBatch) -> None:
    """Raise PipelineError if NaNs in one completion reach another: they pass through any connection of two tokens."""
    num_prompts = len(batch.layout.prompt_attention.lengths)
    # In the row, the first completion follows the shared prompts.
    bounds = batch.layout.self_attention.query_bounds[num_prompts : num_prompts + 2]
    completion = torch.arange(*bounds, device=batch.source_N.device)
    hook = model.model.get_input_embeddings().register_forward_hook(
        lambda _layer, _inputs, embedded_1TD: embedded_1TD.index_fill(1, completion, torch.nan)
    )
    logprobs_N = model(batch).logprobs_N
    hook.remove()
    if not torch.equal(logprobs_N.isnan(), torch.isin(batch.source_N, completion)):
        raise PipelineError(
            f"{type(model.model).__name__} mixes tokens outside attention (such as by a convolution or a "
            "recurrence): completions of the same prompt would affect one another"
        )
