"""One process (rank) of a GRPO training: it builds model, sampler, rewards and trainer, and saves what comes of it."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path

from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint, load, save
from components.policy.engine import Policy, load_parameters, torch_dtype
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters
from components.policy.parallel import init_ranks
from components.policy.shutdown import graceful_shutdown
from components.policy.training import (
    Resumption,
    TrainingCheckpoint,
    disable_dropout,
    make_deterministic,
    memory_for_loading,
)
from components.rollout.sampler import Sampler, grade_completions
from components.rollout.transformers_sampler import ShardedSampler, TransformersSampler
from components.rollout.vllm.engine import VllmEngine
from components.rollout.vllm.sampler import Engine, VllmSampler
from components.rollout.vllm.servers import VllmServers
from components.shared.environment import SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, read_problems
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.monitoring import StepTimer, missing_signal, require_learning
from components.train_grpo.prompts import Prompts
from components.train_grpo.reference import Reference
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import Scorer, require_rewards
from components.train_grpo.rollouts import Rollouts
from components.train_grpo.trainer import Trainer

_NUM_PROBES = 8
"""Training problems by whose solutions a sampler's weights are compared with the trainer's."""
_RESULTS = ("reward", "accuracy", "worked_fraction", "completion_length_tokens", "kl")


def train_rank(
    config: TrainGRPOConfig, *, problems: Path, reference: Path, policy: Path, training: Path, timings: Path, work: Path
) -> dict[str, float]:
    """Take this process's part in the training; the first process writes the outputs. Return metrics of the end."""
    training_problems = read_problems(problems, Split.TRAIN)
    require_rewards(config, training_problems)
    make_deterministic(config.seed)
    ranks = init_ranks(config.engine)
    with ranks.report_lost_ranks(), Verifier() as verify, graceful_shutdown(config.checkpoint.grace_s) as stop:
        resumption = Resumption(ranks, work, config.checkpoint, stage="train_grpo", num_steps=config.num_steps)
        with memory_for_loading("train_grpo", config.engine):
            checkpoint = load(reference, dtype=torch_dtype(config.engine))
        log = work / "launch" / f"vllm-rank-{ranks.rank}.log"
        with closing(make_sampler(config, checkpoint, reference, log)) as sampler:
            with memory_for_loading("train_grpo", config.engine):
                trainer = build_trainer(config, checkpoint, training_problems, verify, sampler, resumption.load())
            resumption.restore_random_state()
            curves = trainer.history.curves

            def after_step(step: int) -> None:
                problem, accuracy = missing_signal(config, curves), curves[-1]["accuracy"]
                last = problem is not None
                is_exported = config.checkpoint.keep_in_registry and step < config.num_steps
                resumption.after_step(
                    step,
                    trainer.policy,
                    trainer.state,
                    stop=stop,
                    score=accuracy,
                    last=last,
                    export=trainer.export if is_exported else None,
                )
                if problem:
                    raise PipelineError(problem)

            if problem := missing_signal(config, curves):  # of a resumed run, before another step
                raise PipelineError(problem)
            trainer.run(steps_done=resumption.steps_done, after_step=after_step)
            require_learning(config, curves)
            with trainer.policy.gather_full_parameters():
                if ranks.is_main:
                    save(checkpoint, policy)
            if ranks.is_main:
                trainer.history.write(training, timings)
                if trainer.reward_model:
                    trainer.reward_model.save(training / "reward_model")
            ranks.barrier("the end")
    return {name: value for name in _RESULTS if (value := curves[-1][name]) is not None}


def build_trainer(
    config: TrainGRPOConfig,
    checkpoint: Checkpoint,
    problems: list[Problem],
    verify: Verifier,
    sampler: Sampler,
    saved: TrainingCheckpoint | None = None,
) -> Trainer:
    """Return the trainer of a new run, in which policy and reference are equal, or of one that was `saved`."""
    disable_dropout(checkpoint.model)
    temperature, reference, reward_model = config.sampling.temperature, None, None
    if config.loss.kl.coefficient > 0:
        reference = Reference(checkpoint.model, config.reference, temperature=temperature)
    if config.reward.model is not None:
        reward_model = RewardModel(config, config.reward.model, checkpoint)
    timer = StepTimer(config, checkpoint)  # it counts weights before they are sharded
    add_adapters(checkpoint.model, config.engine.lora, seed=config.seed)
    model = LogprobModel(checkpoint.model, temperature=temperature)
    if saved:
        load_parameters(model, saved.policy)
    policy = Policy(model, config.engine)
    sampler.attach(policy, [checkpoint.example(problem) for problem in problems[:_NUM_PROBES]])
    prompts = Prompts(problems, config.prompts, seed=config.seed)
    score = Scorer(config, checkpoint, partial(grade_completions, verify), reward_model)
    rollouts = Rollouts(config, prompts, sampler, score, policy.ranks)
    trainer = Trainer(config, checkpoint, policy, rollouts, reference, reward_model, timer)
    if saved:
        policy.load_state(saved.policy)
        trainer.restore(saved.values)
    return trainer


def make_sampler(config: TrainGRPOConfig, checkpoint: Checkpoint, reference: Path, log: Path) -> Sampler:
    """Return what this process samples with; the weights of `checkpoint` must not be sharded yet."""
    engine: Engine
    if config.sampler.servers:
        engine = VllmServers(os.environ[SERVERS_VARIABLE].split(","), config.sampler.servers)
    elif config.sampler.vllm:
        engine = VllmEngine(reference, config.sampler.vllm, dtype=config.engine.dtype, log=log)
    else:
        transformers = ShardedSampler if config.engine.zero_stage == 3 else TransformersSampler
        return transformers(checkpoint, config.sampling.max_batch_size)
    return VllmSampler(
        engine,
        checkpoint,
        temperature=config.sampling.temperature,
        max_mismatch=config.sampler.max_mismatch,
        folder=Path(os.environ[WEIGHTS_VARIABLE]),
    )
