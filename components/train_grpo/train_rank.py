"""Group Relative Policy Optimization in one process, or in one of several that train together."""

from contextlib import ExitStack
from pathlib import Path

from components.grading.verifier import Verifier
from components.policy.checkpoint import Checkpoint, load, save
from components.policy.determinism import make_deterministic
from components.policy.engine import Policy, load_parameters, torch_dtype
from components.policy.flops import FlopCounter
from components.policy.logprobs import LogprobModel, disable_dropout
from components.policy.lora import add_adapters
from components.policy.parallel import init_ranks
from components.policy.resume import Resumption, TrainingCheckpoint
from components.policy.shutdown import graceful_shutdown
from components.policy.training import memory_for_loading, write_curves
from components.rollout.sampler import Sampler
from components.shared import jsonl
from components.shared.problem import Problem, Split, read_problems
from components.train_grpo import no_signal
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.prompts import Prompts
from components.train_grpo.reference import Reference
from components.train_grpo.reward_model import RewardModel
from components.train_grpo.rewards import require_rewards
from components.train_grpo.sampling import sampler_of_rank
from components.train_grpo.scoring import Scorer
from components.train_grpo.trainer import Trainer

_NUM_PROBES = 8
"""Training problems by whose solutions a sampler's weights are compared with the trainer's."""
_FIGURES = ("reward", "accuracy", "worked_fraction", "completion_length_tokens", "kl")


def train_rank(
    config: TrainGRPOConfig, *, problems: Path, reference: Path, policy: Path, training: Path, timings: Path, work: Path
) -> dict[str, float]:
    """Take this process's part in the training; the first process writes what comes of it."""
    training_problems = read_problems(problems, Split.TRAIN)
    require_rewards(config, training_problems)
    make_deterministic(config.seed)
    ranks = init_ranks(config.engine)
    with (
        ranks.report_lost_ranks(),
        ExitStack() as ending,
        Verifier() as verify,
        graceful_shutdown(config.checkpoint.grace_s) as stop,
    ):
        resumption = Resumption(ranks, work, config.checkpoint, stage="train_grpo", num_steps=config.num_steps)
        with memory_for_loading("train_grpo", config.engine):
            checkpoint = load(reference, dtype=torch_dtype(config.engine))
        log = work / "launch" / f"vllm-rank-{ranks.rank}.log"
        sampler = ending.enter_context(sampler_of_rank(config, checkpoint, reference, log))
        with memory_for_loading("train_grpo", config.engine):
            trainer = build_trainer(config, checkpoint, training_problems, verify, sampler, resumption.load())
        resumption.restore_random_state()

        def keep(step: int) -> None:
            accuracy = trainer.history.curves[-1]["accuracy"]
            no_signal.warn(trainer.history.curves)
            last = no_signal.limit_reached(config, trainer.history.curves)
            resumption.after_step(step, trainer.policy, trainer.values, stop=stop, score=accuracy, last=last)
            no_signal.refuse_limit(config, trainer.history.curves)

        no_signal.refuse_limit(config, trainer.history.curves)  # of a resumed run, before another step
        history = trainer.run(steps_done=resumption.steps_done, after_step=keep)
        no_signal.refuse_nothing_learned(config, history.curves)
        with trainer.policy.gather_full_parameters():
            if ranks.is_main:
                save(checkpoint, policy)
        if ranks.is_main:
            _write(trainer, training, timings)
        ranks.barrier("the end")
    figures = {name: history.curves[-1][name] for name in _FIGURES}
    return {name: value for name, value in figures.items() if value is not None}


def build_trainer(
    config: TrainGRPOConfig,
    checkpoint: Checkpoint,
    problems: list[Problem],
    verify: Verifier,
    sampler: Sampler,
    saved: TrainingCheckpoint | None = None,
) -> Trainer:
    """Everything a run needs: policy and reference are equal at first, or as they were `saved`."""
    disable_dropout(checkpoint.model)
    temperature = config.sampling.temperature
    reference = reward_model = None
    if config.loss.kl.coefficient > 0:
        reference = Reference(checkpoint.model, config.reference, temperature=temperature)
    if config.reward.model is not None:
        reward_model = RewardModel.load(
            config.reward.model, checkpoint, micro_batch_tokens=config.engine.micro_batch_tokens
        )
    arithmetic = FlopCounter(checkpoint.model)  # counted before weights are sharded
    add_adapters(checkpoint.model, config.engine.lora, seed=config.seed)
    scorer = LogprobModel(checkpoint.model, temperature=temperature)
    if saved:
        load_parameters(scorer, saved.policy)
    engine = Policy(scorer, config.engine)
    sampler.attach(engine, [checkpoint.example(problem) for problem in problems[:_NUM_PROBES]])
    trainer = Trainer(
        config,
        checkpoint,
        reference=reference,
        sampler=sampler,
        scorer=Scorer(config, checkpoint, verify, reward_model),
        prompts=Prompts(problems, config.prompts, seed=config.seed),
        arithmetic=arithmetic,
        policy=engine,
    )
    if saved:
        engine.load_state(saved.policy)
        trainer.restore(saved.values)
    return trainer


def _write(trainer: Trainer, training: Path, timings: Path) -> None:
    history = trainer.history
    write_curves(training, history.curves)
    jsonl.write_rows(training / "completions.jsonl", history.completions)
    if trainer.reward_model is not None:
        trainer.reward_model.save(training / "reward_model")
    if history.reward_model:
        jsonl.write_rows(training / "reward_model.jsonl", history.reward_model)
    jsonl.write_rows(timings / "timings.jsonl", history.timings)
