"""Group Relative Policy Optimization: the training loop."""

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from components.policy.checkpoint import Checkpoint, load, save
from components.policy.curves import write_curves
from components.policy.determinism import make_deterministic
from components.policy.engine import PolicyEngine, dtype_of
from components.policy.logprobs import CompletionScorer, disable_dropout
from components.policy.schedule import learning_rate
from components.policy.sequences import micro_batches
from components.rollout.transformers_engine import TransformersEngine
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import progress
from components.shared.step import In, Out
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.rollout import Rollout, figures, prompt_batches, records, roll_out
from components.train_grpo.update import update

_STAGE = "train_grpo"


@dataclass
class _History:
    """What a run leaves behind beside the policy."""

    curves: list[dict[str, float]] = field(default_factory=list)
    completions: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)


def train(
    config: TrainGRPOConfig, *, problems: In, reference: In, policy: Out, training: Out, timings: Out
) -> dict[str, float]:
    """Optimise the reference checkpoint with GRPO on the training problems."""
    make_deterministic(config.seed)
    training_problems = read_problems(problems, Split.TRAIN)
    if len(training_problems) < config.prompts_per_step:
        raise PipelineError(
            f"prompts_per_step is {config.prompts_per_step}, but there are only {len(training_problems)} problems"
        )
    checkpoint = load(reference, dtype=dtype_of(config.engine))
    frozen, trained = _models(config, checkpoint)
    history = _train(config, checkpoint, trained, frozen, training_problems)
    with trained.whole_weights():
        save(checkpoint, policy)
    write_curves(training, history.curves)
    jsonl.write_rows(training / "completions.jsonl", history.completions)
    jsonl.write_rows(timings / "timings.jsonl", history.timings)
    last = history.curves[-1]
    return {name: last[name] for name in ("reward", "accuracy", "worked_fraction", "completion_length_tokens", "kl")}


def _models(config: TrainGRPOConfig, checkpoint: Checkpoint) -> tuple[CompletionScorer, PolicyEngine]:
    """The frozen reference and the policy under training, equal at this moment."""
    disable_dropout(checkpoint.model)
    temperature = config.sampling.temperature
    frozen = CompletionScorer(copy.deepcopy(checkpoint.model), temperature=temperature).requires_grad_(False)
    return frozen, PolicyEngine(CompletionScorer(checkpoint.model, temperature=temperature), config.engine)


def _train(
    config: TrainGRPOConfig,
    checkpoint: Checkpoint,
    trained: PolicyEngine,
    frozen: CompletionScorer,
    problems: list[Problem],
) -> _History:
    generate = TransformersEngine(checkpoint, config.sampling.max_batch_size)
    prompts = prompt_batches(problems, config.prompts_per_step, seed=config.seed)
    history = _History()
    with progress(_STAGE, config.num_steps) as shown:
        for step in range(1, config.num_steps + 1):
            started = time.monotonic()
            rollout = roll_out(config, generate, next(prompts), seed=config.seed + step)
            sampled = time.monotonic()
            updated = _update(config, checkpoint, trained, frozen, rollout, step)
            row = {"step": step, **figures(rollout), **updated}
            history.curves.append(row)
            history.completions.extend(records(rollout, step=step, count=config.completions_kept_per_step))
            timing = _timing(rollout, step, started, sampled, time.monotonic())
            history.timings.append(timing)
            shown.advance(
                reward=row["reward"],
                accuracy=row["accuracy"],
                length=row["completion_length_tokens"],
                kl=row["kl"],
                tokens_per_s=timing["tokens_per_s"],
            )
    return history


def _update(
    config: TrainGRPOConfig,
    checkpoint: Checkpoint,
    trained: PolicyEngine,
    frozen: CompletionScorer,
    rollout: Rollout,
    step: int,
) -> dict[str, float]:
    batches = micro_batches(
        [completion.tokens for completion in rollout.completions_B],
        max_tokens=config.engine.micro_batch_tokens,
        pad_id=checkpoint.pad_id,
        device=checkpoint.device,
    )
    rate = learning_rate(
        step - 1,
        peak=config.learning_rate,
        warmup_steps=config.warmup_steps,
        num_steps=config.num_steps,
        final_fraction=config.final_learning_rate_fraction,
    )
    # Advantages are exact in float64; the loss is in float32, the type of the log-probabilities.
    advantages_B = rollout.advantages_PG.flatten().to(checkpoint.device, torch.float32)
    return update(config, trained, frozen, batches, advantages_B, rate)


def _timing(rollout: Rollout, step: int, started: float, sampled: float, updated: float) -> dict[str, float]:
    num_tokens = sum(len(completion.tokens.completion_ids) for completion in rollout.completions_B)
    return {
        "step": step,
        "sampling_s": round(sampled - started, 4),
        "update_s": round(updated - sampled, 4),
        "tokens_per_s": round(num_tokens / (updated - started), 1),
    }
