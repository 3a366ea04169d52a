"""Group Relative Policy Optimization: from the reference checkpoint to the policy."""

import copy
from pathlib import Path

from components.policy.checkpoint import Checkpoint, load, save
from components.policy.curves import write_curves
from components.policy.determinism import make_deterministic
from components.policy.engine import PolicyEngine, dtype_of, refuse_several_processes
from components.policy.flops import Arithmetic
from components.policy.logprobs import CompletionScorer, disable_dropout
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.grading.verifier import Verifier
from components.shared.problem import Problem, Split, read_problems
from components.shared.step import In, Out
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.prompts import Prompts
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import require_rewards
from components.train_grpo.scoring import Scorer
from components.train_grpo.trainer import History, Trainer

_FIGURES = ("reward", "accuracy", "worked_fraction", "completion_length_tokens", "kl")


def train(
    config: TrainGRPOConfig, *, problems: In, reference: In, policy: Out, training: Out, timings: Out
) -> dict[str, float]:
    """Optimise the reference checkpoint with GRPO on the training problems."""
    refuse_several_processes()
    make_deterministic(config.seed)
    training_problems = read_problems(problems, Split.TRAIN)
    require_rewards(config, training_problems)
    checkpoint = load(reference, dtype=dtype_of(config.engine))
    with Verifier() as verify:
        trainer = build_trainer(config, checkpoint, training_problems, verify)
        history = trainer.run()
    if all(row["ratio_max"] is None for row in history.curves):
        raise PipelineError(
            "no rollout of the run had anything to learn from: the rewards of each group were all equal; "
            "the reference has to be right now and then, and wrong now and then"
        )
    with trainer.policy.whole_weights():
        save(checkpoint, policy)
    if trainer.reward_model is not None:
        trainer.reward_model.save(training / "reward_model")
    _write(history, training, timings)
    figures = {name: history.curves[-1][name] for name in _FIGURES}
    return {name: value for name, value in figures.items() if value is not None}


def build_trainer(
    config: TrainGRPOConfig, checkpoint: Checkpoint, problems: list[Problem], verify: Verifier
) -> Trainer:
    """Everything a run needs; policy and reference are equal at this moment."""
    disable_dropout(checkpoint.model)
    temperature = config.sampling.temperature
    reference = reward_model = None
    if config.loss.kl.coefficient > 0:
        reference = CompletionScorer(copy.deepcopy(checkpoint.model), temperature=temperature).requires_grad_(False)
    if config.reward.model is not None:
        reward_model = RewardModel.load(
            config.reward.model, checkpoint, micro_batch_tokens=config.engine.micro_batch_tokens
        )
    return Trainer(
        config,
        checkpoint,
        reference=reference,
        scorer=Scorer(config, checkpoint, verify, reward_model),
        prompts=Prompts(problems, config.prompts, seed=config.seed),
        arithmetic=Arithmetic(checkpoint.model),  # counted before weights are sharded
        policy=PolicyEngine(CompletionScorer(checkpoint.model, temperature=temperature), config.engine),
    )


def _write(history: History, training: Path, timings: Path) -> None:
    write_curves(training, history.curves)
    jsonl.write_rows(training / "completions.jsonl", history.completions)
    if history.reward_model:
        jsonl.write_rows(training / "reward_model.jsonl", history.reward_model)
    jsonl.write_rows(timings / "timings.jsonl", history.timings)
