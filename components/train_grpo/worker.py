"""One process (rank) of a GRPO training: it builds model, sampler, rewards and trainer, and saves the result."""

import os
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

from components.environments.pool import Environments
from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint, load, save
from components.policy.engine import Policy, torch_dtype
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters
from components.policy.parallel import init_ranks
from components.policy.shutdown import StopRequest, graceful_shutdown
from components.policy.tracking import TrainingLog, training_log
from components.policy.training import Resumption, TrainingCheckpoint, explain_memory_for_loading, prepare_process
from components.rollout.sampler import Sampler, grade_completions
from components.rollout.transformers_sampler import ShardedSampler, TransformersSampler
from components.rollout.vllm.process import server_beside
from components.rollout.vllm.sampler import VllmSampler
from components.rollout.vllm.servers import VllmServers
from components.shared import jsonl
from components.shared.environment import SERVERS_VARIABLE, WEIGHTS_VARIABLE
from components.shared.errors import PipelineError
from components.shared.model import weights_folder
from components.shared.problem import Problem, Split, draw, read_problems
from components.shared.progress import say
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.monitoring import Profiler, StepTimer, missing_signal, require_learning
from components.train_grpo.prefetched_rollouts import PrefetchedRollouts
from components.train_grpo.prompts import Prompts
from components.train_grpo.reference import AdapterReference, Reference
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import require_rewards
from components.train_grpo.rollouts import Rollouts
from components.train_grpo.scoring import Scorer
from components.train_grpo.slow_rewards import Answers, write_totals
from components.train_grpo.teacher import load_teacher
from components.train_grpo.trainer import Trainer
from components.train_grpo.validation import Validator, best_validation, choose_result, early_stop

_NUM_PROBES = 8
"""Training problems whose solutions verify that sampler and trainer have the same weights, by log-probabilities."""
_STAGE = "train_grpo"


def train_rank(
    config: TrainGRPOConfig, *, problems: Path, reference: Path, policy: Path, training: Path, timings: Path, work: Path
) -> dict[str, float]:
    """Train as one of the processes; the main one writes the outputs. Return the metrics of the resulting policy."""
    training_problems = read_problems(problems, Split.TRAIN)
    held_out = read_problems(problems, Split.DEV) if config.validation else []
    require_rewards(config, training_problems)
    prepare_process(config.seed)
    ranks = init_ranks(config.engine)
    with ranks.report_lost_ranks(), Verifier() as verify, graceful_shutdown(config.checkpoint.grace_s) as stop:
        resumption = Resumption(ranks, work, config.checkpoint, stage=_STAGE, num_steps=config.num_steps)
        with explain_memory_for_loading(_STAGE, config.engine):
            checkpoint = load(reference, dtype=torch_dtype(config.engine), quantise=config.engine.quantise)
        tools = checkpoint.format.tools
        with (
            closing(make_sampler(config, checkpoint, reference, work / "servers")) as sampler,
            closing(Environments(tools)) if tools else nullcontext() as environments,
        ):
            with explain_memory_for_loading(_STAGE, config.engine):
                trainer = build_trainer(
                    config, checkpoint, training_problems, verify, sampler, resumption.load(), held_out, environments
                )
            assert isinstance(trainer.rollouts.score, Scorer)
            trainer.rollouts.score.answers = Answers(work / "answers", rank=ranks.rank)
            resumption.restore_random_state()
            history = trainer.history
            if problem := missing_signal(config, history.curves):  # of the steps before a restart
                raise PipelineError(problem)
            trainer.profiler = Profiler(config, work) if ranks.is_main else None
            with training_log(_STAGE, config, ranks, work, history.rows, history.completions) as live:
                trainer.run(
                    steps_done=resumption.steps_done, after_step=partial(_after_step, trainer, resumption, stop, live)
                )
                require_learning(config, history.curves)
                weights, metrics, result = choose_result(config, history, resumption.best)
            with trainer.policy.gather_full_parameters():
                if ranks.is_main:
                    if weights:
                        trainer.policy.load_weights(weights)
                    save(checkpoint, policy)
            if trainer.profiler:
                trainer.profiler.copy(training)
            if ranks.is_main:
                history.write(training, timings)
                write_totals(work / "answers", timings / "reward_calls.json", config.reward.judge)
                if config.validation:
                    jsonl.write_json(training / "result.json", result)
            if trainer.reward_model:
                trainer.reward_model.save(training / "reward_model")
            ranks.barrier("the end")
    return metrics


def _after_step(trainer: Trainer, resumption: Resumption, stop: StopRequest, live: TrainingLog, step: int) -> None:
    """Log a step, and write a checkpoint if one is due; PipelineError if the run has no learning signal."""
    config, history = trainer.config, trainer.history
    live.step(*history.of_step(step))
    problem = missing_signal(config, history.curves)
    early = early_stop(config, history)
    validation = next((each for each in history.validation if each["step"] == step), None)
    is_best = validation is not None and validation == best_validation(history.validation)
    is_exported = config.publishes_checkpoints and step < config.num_steps
    resumption.after_step(
        step,
        trainer.policy,
        trainer.state,
        stop=stop,
        score=validation["accuracy"] if validation else None,
        due=problem is not None or early is not None or (is_best and config.checkpoint.keep_best),
        tensors=trainer.reward_model.tensors if trainer.reward_model else dict,  # dict() is empty: no tensors
        export=trainer.export if is_exported else None,
    )
    if problem:
        raise PipelineError(problem)


def build_trainer(
    config: TrainGRPOConfig,
    checkpoint: Checkpoint,
    problems: list[Problem],
    verify: Verifier,
    sampler: Sampler,
    saved: TrainingCheckpoint | None = None,
    held_out: Sequence[Problem] = (),
    environments: Environments | None = None,
) -> Trainer:
    """Return the trainer of a new run, in which policy and reference are equal, or of one that was `saved`.

    `held_out` are the problems of the dev split, for validation; `environments` are those of `checkpoint.config.tools`.
    Reference, reward model and timer read or copy the weights, so they precede the policy, which shards them.
    """
    temperature, placement = config.sampling.temperature, config.reference_placement
    has_kl = config.loss.kl.coefficient > 0
    reference: Reference | AdapterReference | None = None
    if has_kl and placement != "adapters":
        reference = Reference(checkpoint.model, placement, temperature=temperature)
    reward_model = RewardModel(config, config.reward.model, checkpoint, saved) if config.reward.model else None
    timer = StepTimer(config, checkpoint)
    teacher = load_teacher(config.teacher, config, checkpoint) if config.teacher else None
    add_adapters(checkpoint.model, config.engine.lora, seed=config.seed)
    model = LogprobModel(checkpoint.model, temperature=temperature)
    policy = Policy(model, config.engine, saved.policy if saved else None)
    if checkpoint.is_padded and policy.ranks.is_main:
        say(_STAGE, checkpoint.cost_of_padding())
    if has_kl and placement == "adapters":
        reference = AdapterReference(policy, checkpoint.model)
    sampler.attach(policy, checkpoint.examples(problems[:_NUM_PROBES]))
    prompts = Prompts(problems, config.prompts, seed=config.seed)
    grade = partial(grade_completions, verify)
    score = Scorer(config, checkpoint, grade, reward_model)
    rollouts_class: type[Rollouts] = PrefetchedRollouts if config.sampler.max_staleness else Rollouts
    rollouts = rollouts_class(config, prompts, sampler, score, policy.ranks, environments)
    validator = None
    if config.validation:
        subset = draw(held_out, config.validation.num_problems, config.seed)
        validator = Validator(config, subset, sampler, grade, checkpoint.config.answer, policy.ranks, environments)
    trainer = Trainer(config, checkpoint, policy, rollouts, reference, reward_model, timer, validator, teacher)
    if saved:
        trainer.restore(saved.values)
    return trainer


def make_sampler(config: TrainGRPOConfig, checkpoint: Checkpoint, reference: Path, logs: Path) -> Sampler:
    """Return the sampler of this process; the weights of `checkpoint` must not be sharded yet."""
    if config.sampler.servers:
        urls = os.environ[SERVERS_VARIABLE].split(",")
        engine = VllmServers(urls, config.sampler.servers, base=weights_folder(reference))
    elif config.sampler.vllm:
        engine = server_beside(
            weights_folder(reference),
            config.sampler.vllm,
            dtype=config.sampler_dtype,
            logs=logs,
            lora=config.engine.lora,
            has_tokenizer=checkpoint.config.tools is not None,
        )
    else:
        sampler_class = ShardedSampler if config.engine.zero_stage == 3 else TransformersSampler
        return sampler_class(checkpoint, config.sampling.max_batch_size)
    return VllmSampler(
        engine,
        checkpoint,
        temperature=config.sampling.temperature,
        max_mismatch=config.sampler.max_mismatch,
        folder=Path(os.environ[WEIGHTS_VARIABLE]),
    )
