"""Policies for vLLM, and what the trainer says of their tokens."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from components.policy.checkpoint import Checkpoint, create
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.rollout.sampler import Completion, Sampling
from components.rollout.vllm.config import ServersConfig, VllmConfig
from components.rollout.vllm.process import server_beside
from components.rollout.vllm.sampler import VllmSampler
from components.rollout.vllm.servers import VllmServers
from components.shared.answer_policy import AnswerPolicy
from components.shared.model import ModelConfig
from tests import tiny
from tests.policy import plain

QUESTIONS = [*(problem.question for problem in tiny.PROBLEMS[:3]), "Tom has 3 apples. " * 60]
"""The last is long enough for vLLM to keep its prefix: on CPUs it keeps blocks of 128 tokens."""
VLLM = {"max_tokens": 512, "cache_gib": 0.25, "compile": False, "start_deadline_s": 60, "request_deadline_s": 60}


def policy(seed: int, *, tied: bool = False) -> Checkpoint:
    """Return a model that is far from uniform, with many end tokens; `tied` shares embeddings and output layer."""
    # Heads of 32: vLLM has no attention for smaller ones on CPUs.
    model = ModelConfig(base="scratch:math", prompt="{question}\n", answer=AnswerPolicy.DECLARED)
    checkpoint = create(model, tiny.PROBLEMS, seed=seed, dtype=torch.float32)
    if tied:
        checkpoint.model.config.tie_word_embeddings = True
        checkpoint.model.tie_weights()
    with torch.no_grad():
        for weight in checkpoint.model.parameters():
            weight.mul_(1.5)
    checkpoint.model.generation_config.eos_token_id = list(range(1, checkpoint.model.config.vocab_size, 30))
    return checkpoint


def trainer_logprobs(checkpoint: Checkpoint, sequences: list[TokenSequence], temperature: float) -> list[list[float]]:
    """What the trainer says of each completion token."""
    scores_M = plain.logprobs(LogprobModel(checkpoint.model, temperature=temperature), sequences, 2000)
    return [part.tolist() for part in scores_M.split([len(sequence.completion_ids) for sequence in sequences])]


def largest_difference(one: list[list[float]], other: list[list[float]]) -> float:
    """Return the largest difference of log-probabilities of the same tokens."""
    pairs = [pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)]
    return max(abs(left - right) for left, right in pairs)


def drawn(
    engine: VllmServers, checkpoint: Checkpoint, questions: Sequence[str] = QUESTIONS, **settings: Any
) -> list[Completion]:
    """Return the completions of all questions, one group after the other."""
    sampling = Sampling(**{"num_samples": 6, "temperature": 1.0, "max_new_tokens": 25, "seed": 1, **settings})
    groups = sampler(engine, checkpoint).generate(tiny.asked(questions), sampling)
    return [completion for group in groups for completion in group]


def difference(completions: Sequence[Completion], checkpoint: Checkpoint, temperature: float = 1.0) -> float:
    """Return the largest difference of a token's log-probability from the one that the trainer computes."""
    exact = trainer_logprobs(checkpoint, [completion.tokens for completion in completions], temperature)
    return largest_difference([list(completion.logprobs) for completion in completions], exact)


class Words:
    """A policy whose tokens are the letters of the prompt."""

    end_ids = (1,)
    device = torch.device("cpu")
    format = SimpleNamespace(turn_stops=(), call_format="message", rewrites_history=False)
    model = SimpleNamespace(config=SimpleNamespace(to_dict=dict))
    prompt_ids = staticmethod(lambda question, source, earlier: tuple(question.encode()))
    opens_thought = staticmethod(lambda prompt_ids: False)
    decode = staticmethod(str)


def servers_config(**changes: Any) -> ServersConfig:
    """Return the settings of a client of servers."""
    return ServersConfig.model_validate({**VLLM, "num_servers": 1, "lost_deadline_s": 60, **changes})


def beside(folder: Path, config: VllmConfig, logs: Path, **options: Any) -> VllmServers:
    """Return vLLM beside this process, with the model in a folder."""
    settings: dict[str, Any] = {"lora": None, "has_tokenizer": False, **options}
    return server_beside(folder, config, dtype="float32", logs=logs, **settings)


def sampler(engine: VllmServers, checkpoint: Checkpoint) -> VllmSampler:
    """Return a sampler on an engine whose weights are set by the test itself."""
    return VllmSampler(engine, checkpoint, temperature=1.0, max_mismatch=0.0, folder=Path())
