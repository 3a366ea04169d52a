"""Log-probabilities of completion tokens under a model, and the entropies of its distributions at these tokens.

The output layer is applied to one chunk of tokens at a time (output_layer.py). Shape suffixes as in packing.py, and
    C  tokens of a chunk, D  hidden size, V  vocabulary
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from components.policy.attention import use_packed_attention
from components.policy.decoder import Decoder, is_supported_in_training
from components.policy.output_layer import TeacherTerm, TokenHead, TokenLogprobs, TokenLoss
from components.policy.packing import MicroBatch
from components.policy.padded import padded_because, token_logits, token_scores


class LogprobModel(nn.Module):
    """A language model with its `TokenHead` in one module, which DeepSpeed trains: ZeRO needs a single forward.

    A model that needs padded rows (padded.py) computes its logits itself.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float, with_entropy: bool = True) -> None:
        super().__init__()
        self.temperature, self.with_entropy = temperature, with_entropy
        self.model, self.head = model, None
        if not padded_because(model):
            self.model = use_packed_attention(model)
            self.head = TokenHead(model.get_output_embeddings(), temperature=temperature, with_entropy=with_entropy)

    def forward(
        self,
        batch: MicroBatch,
        token_loss: TokenLoss | None = None,
        *,
        is_sum: bool = True,
        term: TeacherTerm | None = None,
    ) -> TokenLogprobs | Tensor:
        """Return the log-probabilities of the N completion tokens of `batch`, or their loss if `token_loss` is given.

        If the loss is a sum over tokens, it is computed chunk by chunk with its gradient, which saves computing the
        logits again in the backward pass. The term of a teacher is added to the loss.
        """
        if self.head is None:
            return self._forward_padded(batch, token_loss, term)
        inputs = (self._hidden(batch), batch.target_N)
        if token_loss is None:
            return TokenLogprobs(*self.head(*inputs))
        if is_sum:
            fused: Tensor = self.head(*inputs, token_loss, term=term)
            return fused
        loss = token_loss(TokenLogprobs(*self.head(*inputs)), slice(len(batch.target_N)))
        return loss + self.head(*inputs, term=term) if term else loss

    def _forward_padded(
        self, batch: MicroBatch, token_loss: TokenLoss | None, term: TeacherTerm | None
    ) -> TokenLogprobs | Tensor:
        """Return the same as `forward` for a model that needs padded rows, computed from all logits at once."""
        logits_NV = token_logits(self.model, batch) / self.temperature
        scores = TokenLogprobs(*token_scores(logits_NV, batch.target_N, with_entropy=self.with_entropy))
        if token_loss is None:
            return scores
        loss = token_loss(scores, slice(len(batch.target_N)))
        if term:
            logprobs_NV, teacher_NV = logits_NV.log_softmax(-1), term.teacher_logits(slice(None)).log_softmax(-1)
            kl_N = (logprobs_NV.exp() * (logprobs_NV - teacher_NV)).sum(-1)
            term.kl_N = kl_N.detach()
            loss = loss + (term.weight_N * kl_N).sum()
        return loss

    def logits_of(self, batch: MicroBatch) -> Callable[[slice], Tensor]:
        """Return a function that computes logits / temperature of a slice of the tokens, (C, V), without gradient."""
        with torch.no_grad():
            if self.head is None:
                return (token_logits(self.model, batch) / self.temperature).__getitem__
            return self.head.logits(self._hidden(batch), batch.target_N)

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states that completion tokens are predicted from, (N, D)."""
        decoder = self.model.get_decoder()
        if is_supported_in_training(decoder):
            # The last token of a prompt predicts the first one of each of its completions: compute it once.
            source_U, place_N = torch.unique(batch.source_N, return_inverse=True)
            return Decoder(decoder)(batch.input_ids_T, batch.position_ids_T, batch.layout, source_U)[place_N]
        hidden_1TD: Tensor = decoder(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            layout=batch.layout,
            use_cache=False,
        ).last_hidden_state
        return hidden_1TD[0, batch.source_N]


@torch.no_grad()
def completion_logprobs(
    model: Callable[[MicroBatch], TokenLogprobs], batches: Sequence[MicroBatch], num_tokens: int
) -> Tensor:
    """Return the log-probability of each of M = `num_tokens` completion tokens; NaN for those not in `batches`."""
    logprobs_M = torch.full((num_tokens,), torch.nan, dtype=torch.float64, device=batches[0].target_N.device)
    for batch in batches:
        logprobs_M[batch.token_N] = model(batch).logprobs_N.double()
    return logprobs_M
