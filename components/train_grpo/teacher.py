"""The teacher of on-policy distillation: a frozen model in this process, or one behind a vLLM server."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from components.policy.checkpoint import Checkpoint, create, load, load_without_weights
from components.policy.engine import torch_dtype
from components.policy.packing import TokenSequence
from components.shared.errors import PipelineError
from components.shared.model import PIPELINE_FILE, local_model
from components.train_grpo.api import RETRIES, Api
from components.train_grpo.config import TeacherConfig, TrainGRPOConfig
from components.train_grpo.reference import Reference

_MAX_REQUESTS = 64
"""Concurrent requests of each process."""
_REQUEST_S = 600.0
"""Timeout of a request, long because requests queue in the server."""


def load_teacher(teacher: TeacherConfig, config: TrainGRPOConfig, student: Checkpoint) -> "Reference | TeacherServer":
    """Return the teacher; PipelineError if its vocabulary is not that of the student."""
    folder, dtype = Path(local_model(teacher.base)), torch_dtype(config.engine)
    if teacher.server:
        loaded = load_without_weights(folder)  # for the tokenizer
    elif (folder / PIPELINE_FILE).is_file():  # saved by a stage
        loaded = load(folder, dtype=dtype)
    else:
        model_config = student.config.model_copy(update={"base": teacher.base})
        loaded = create(model_config, [], seed=config.seed, dtype=dtype)
    if loaded.tokenizer.get_vocab() != student.tokenizer.get_vocab():
        raise PipelineError(
            f"train_grpo.teacher.base: {teacher.base} has another tokenizer than the policy; it has to be the same"
        )
    if teacher.server:
        return TeacherServer(teacher.server, teacher.key_variable)
    return Reference(loaded.model, teacher.placement, temperature=config.sampling.temperature)


class TeacherServer:
    """A teacher on a vLLM server, which returns log-probabilities of prompt tokens at temperature 1."""

    def __init__(self, url: str, key_variable: str | None = None) -> None:
        """`url` is that of the API; PipelineError if the environment variable `key_variable` is not set."""
        url, key = f"{url.rstrip('/')}/completions", "train_grpo.teacher"
        self._api = Api(url, key, key_variable, retries=RETRIES, timeout_s=_REQUEST_S, maxsize=_MAX_REQUESTS)

    def logprobs(self, sequences_B: Sequence[TokenSequence], indices: Collection[int]) -> Tensor:
        """Return the log-probability of each of the M sampled tokens; NaN for completions not in `indices`.

        PipelineError if the server returns no log-probabilities of prompts; for other errors see `Api.post`.
        """
        branches_of = {index: sequences_B[index].branches for index in indices}
        logprobs_of: dict[int, list[float]] = {}
        with ThreadPoolExecutor(_MAX_REQUESTS) as threads:
            scores = threads.map(self._score, chain(*branches_of.values()))  # of all branches, in order
            for index, branches in branches_of.items():
                logprobs_of[index] = list(chain(*islice(scores, len(branches))))
        logprobs_M: list[float] = []
        for index, sequence in enumerate(sequences_B):
            logprobs_M += logprobs_of.get(index, [torch.nan] * sequence.num_sampled)
        return torch.tensor(logprobs_M, dtype=torch.float64)

    def _score(self, sequence: TokenSequence) -> list[float]:
        """Return the log-probability of each sampled token of a sequence without forks."""
        ids = [*sequence.prompt_ids, *sequence.completion_ids]
        # vLLM insists on a new token; with 0 alternatives it returns the log-probability of each prompt token alone.
        answer = self._api.post({"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1})
        places = [len(sequence.prompt_ids) + place for place in sequence.sampled_places]
        try:
            logprobs = answer["choices"][0]["prompt_logprobs"]
            return [float(logprobs[place][str(ids[place])]["logprob"]) for place in places]
        except (LookupError, TypeError):
            raise PipelineError(f"{self._api.where} returns no log-probabilities of the prompt; vLLM does") from None
