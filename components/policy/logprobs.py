"""Log-probabilities of completion tokens under a model, and the entropy of what it would have said.

Shape suffixes as in sequences.py, and D for the hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.sequences import MicroBatch, TokenSequence, micro_batches
from components.policy.shared_prefix import attend_by_layout
from components.policy.token_head import TokenHead, make_precise
from components.shared.errors import PipelineError


@dataclass(frozen=True)
class TokenScores:
    """What a model says of each completion token."""

    logprobs_N: Tensor
    """Natural log of the probability of the token, at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the distribution the token was drawn from."""


class CompletionScorer(nn.Module):
    """Scores completion tokens: the module that is trained, so that sharding sees one forward."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.model = attend_by_layout(model)
        self.head = TokenHead(model.get_output_embeddings(), temperature=temperature)

    def forward(self, batch: MicroBatch) -> TokenScores:
        """Return the scores of the N completion tokens of `batch`."""
        hidden_1TD = self.model.get_decoder()(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            layout=batch.layout,
            use_cache=False,
        ).last_hidden_state
        return TokenScores(*self.head(hidden_1TD[0, batch.source_N], batch.target_N))


@torch.no_grad()
def completion_logprobs(
    scorer: Callable[[MicroBatch], TokenScores], batches: Sequence[MicroBatch], num_tokens: int
) -> Tensor:
    """Return the log-probability of every completion token that is in `batches`, at its place of M; NaN elsewhere."""
    logprobs_M = torch.full((num_tokens,), torch.nan, dtype=torch.float64, device=batches[0].target_N.device)
    for batch in batches:
        logprobs_M[batch.token_N] = scorer(batch).logprobs_N.double()
    return logprobs_M


@torch.no_grad()
def refuse_other_logits(model: PreTrainedModel, ids: tuple[int, ...]) -> None:
    """Stop if the model's own log-probabilities are not those that are trained on.

    Some families rescale or cap their logits after the output layer (Gemma, Cohere, Granite), or attend by rules of
    their own: what they sample would not be what is scored here.
    """
    make_precise(model.get_output_embeddings())
    sequences = [TokenSequence(ids, (*ids, ids[0])), TokenSequence(ids, ids)]
    logprobs = []
    for sequence in sequences:
        whole = torch.tensor([(*sequence.prompt_ids, *sequence.completion_ids)], device=model.device)
        logits_SV = model(input_ids=whole, use_cache=False).logits[0, len(ids) - 1 : -1].float()
        logprobs.append(logits_SV.log_softmax(-1).gather(1, whole[0, len(ids) :, None]).squeeze(1))
    batches = micro_batches(sequences, max_tokens=10**9, device=model.device)
    logprobs_M = torch.cat(logprobs).double()
    scored_M = completion_logprobs(CompletionScorer(model, temperature=1.0), batches, len(logprobs_M))
    # In bfloat16 two kernels for the same attention differ in the third digit of the hidden states.
    tolerance = 1e-1 if model.dtype == torch.bfloat16 else 1e-2
    if not torch.allclose(scored_M, logprobs_M, rtol=tolerance, atol=tolerance):
        name = type(model).__name__
        raise PipelineError(f"{name} does not follow the usual attention and output layer, which training here needs")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero: with dropout, the ratio to the sampling policy is not one at the start."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            attention: Any = module
            attention.attention_dropout = 0.0
