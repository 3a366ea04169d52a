"""Log-probabilities of completion tokens under a model, and the entropy of what it would have said.

Shape suffixes as in sequences.py, and D for the hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.sequences import MicroBatch
from components.shared.errors import PipelineError


@dataclass(frozen=True)
class TokenScores:
    """What a model says of each completion token."""

    logprobs_N: Tensor
    """Natural log of the probability of the token, at the sampling temperature."""
    entropy_N: Tensor
    """Entropy in nats of the distribution the token was drawn from; carries no gradient."""


class CompletionScorer(nn.Module):
    """Scores completion tokens: the module that is trained, so that sharding sees one forward.

    Logits are made for completion tokens only, never for prompts or padding, in float32 at least (a bfloat16
    softmax is where samplers and trainers disagree most).
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, batch: MicroBatch) -> TokenScores:
        """Return the scores of the N completion tokens of `batch`."""
        hidden_BSD = self.model.get_decoder()(
            input_ids=batch.input_ids_BS, attention_mask=batch.attention_mask_BS, use_cache=False
        ).last_hidden_state
        hidden_ND = hidden_BSD[batch.row_N, batch.position_N]
        logits_NV = self.model.get_output_embeddings()(hidden_ND)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / self.temperature
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.no_grad():
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return TokenScores(logprobs_NV.gather(1, batch.target_N[:, None]).squeeze(1), entropy_N)


@torch.no_grad()
def refuse_other_logits(model: PreTrainedModel, ids: tuple[int, ...]) -> None:
    """Stop if the model's own logits are not those that are trained on.

    Some families rescale or cap their logits after the output layer (Gemma, Cohere, Granite): what they sample would
    not be what is scored here.
    """
    input_ids_BS = torch.tensor([ids], device=model.device)
    hidden_BSD = model.get_decoder()(input_ids=input_ids_BS, use_cache=False).last_hidden_state
    scored_BSV = model.get_output_embeddings()(hidden_BSD).float()
    sampled_BSV = model(input_ids=input_ids_BS, use_cache=False).logits.float()
    if not torch.allclose(scored_BSV, sampled_BSV, rtol=1e-2, atol=1e-2):
        name = type(model).__name__
        raise PipelineError(f"{name} changes its logits after the output layer, which training here does not follow")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero: with dropout, the ratio to the sampling policy is not one at the start."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            attention: Any = module
            attention.attention_dropout = 0.0
