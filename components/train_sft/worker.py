"""Supervised fine-tuning, as each of the processes that train together runs it."""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from components.policy.checkpoint import Checkpoint, create, load_without_weights, save, save_base
from components.policy.engine import Policy, torch_dtype
from components.policy.logprobs import LogprobModel
from components.policy.lora import add_adapters
from components.policy.packing import TokenSequence, pack_shard
from components.policy.parallel import init_ranks
from components.policy.shutdown import graceful_shutdown
from components.policy.tracking import training_log
from components.policy.training import (
    Resumption,
    explain_memory_for_loading,
    explain_memory_for_update,
    learning_rate,
    prepare_process,
    write_curves,
)
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import progress, say
from components.train_sft.config import TrainSFTConfig

_STAGE = "train_sft"
_COLUMNS = ("step", "loss", "gradient_norm", "learning_rate", "epoch")
"""Columns of the curves of a training without steps."""


def train_rank(
    config: TrainSFTConfig, *, problems: Path, base_model: Path, reference: Path, training: Path, work: Path
) -> dict[str, float]:
    """Train as one of the processes, of which the main one writes the outputs; return the final metrics."""
    prepare_process(config.seed)
    training_problems = read_problems(problems, Split.TRAIN)
    ranks = init_ranks(config.engine)
    with ranks.report_lost_ranks(), graceful_shutdown(config.checkpoint.grace_s) as stop:
        resumption = Resumption(ranks, work, config.checkpoint, stage=_STAGE, num_steps=config.num_steps)
        with explain_memory_for_loading(_STAGE, config.engine):
            dtype, quantise = torch_dtype(config.engine), config.engine.quantise
            checkpoint = create(config.model, training_problems, seed=config.seed, dtype=dtype, quantise=quantise)
        checkpoint.require_room_for_observations()
        if ranks.is_main:
            save_base(checkpoint, base_model)
        examples = _tokenized(config, checkpoint, training_problems)
        with explain_memory_for_loading(_STAGE, config.engine):
            policy, curves = _policy_and_curves(config, checkpoint, resumption)
        with training_log(_STAGE, config, ranks, work, curves) as log, progress(_STAGE, config.num_steps) as bar:
            num_done = len(curves)
            bar.skip(num_done)
            batches = _batches(examples, config.examples_per_step, seed=config.seed)
            for step, batch in enumerate(islice(batches, num_done, config.num_steps), start=num_done + 1):
                with explain_memory_for_update(_STAGE, config.engine):
                    metrics = _step(config, checkpoint, policy, batch, step)
                curves.append({"step": step, **metrics, "epoch": step * config.examples_per_step / len(examples)})
                num_tokens = sum(map(len, batch))
                tokens_per_s = bar.rate(num_tokens)
                bar.advance(loss=metrics["loss"], tokens_per_s=tokens_per_s)
                log.step({**curves[-1], "step_s": num_tokens / tokens_per_s, "tokens_per_s": tokens_per_s})
                resumption.after_step(step, policy, lambda: {"curves": curves}, stop=stop)
        with policy.gather_full_parameters():
            if ranks.is_main:
                save(checkpoint, reference)
                write_curves(training, curves)
        ranks.barrier("the end")
    return {"loss": curves[-1]["loss"], "examples": len(examples), "left_out": len(training_problems) - len(examples)}


def keep_base(
    config: TrainSFTConfig, *, problems: Path, base_model: Path, reference: Path, training: Path
) -> dict[str, float]:
    """Write the outputs for 0 steps: base model and reference are the same.

    Both have weights if the model is made from scratch; otherwise both only refer to `model.base`.
    """
    if config.model.scratch:
        training_problems = read_problems(problems, Split.TRAIN)
        checkpoint = create(config.model, training_problems, seed=config.seed, dtype=torch_dtype(config.engine))
    else:
        checkpoint = replace(load_without_weights(Path(config.model.base)), config=config.model)
    checkpoint.require_room_for_observations()
    save_base(checkpoint, base_model)
    shutil.copytree(base_model, reference, copy_function=shutil.copyfile, dirs_exist_ok=True)
    write_curves(training, [], columns=_COLUMNS)
    say(_STAGE, f"no fine-tuning: the reference is the base model, {config.model.base}")
    return {}


def _tokenized(config: TrainSFTConfig, checkpoint: Checkpoint, problems: Sequence[Problem]) -> list[TokenSequence]:
    """Return the examples of the problems that have a solution, without those longer than `max_tokens`."""
    checkpoint.format.require_answers()
    solved = checkpoint.examples([problem for problem in problems if problem.solution.strip()])
    if not solved:
        raise PipelineError(f"{_STAGE}.num_steps: no train problem has a solution to imitate; set it to 0")
    if len(solved) < len(problems):
        say(_STAGE, f"{len(problems) - len(solved):,} problems have no solution to imitate and are left out")
    examples = [example for example in solved if len(example) <= config.max_tokens]
    if not examples:
        limit = f"{_STAGE}.max_tokens: no example has at most {config.max_tokens} tokens"
        raise PipelineError(f"{limit}, the shortest has {min(map(len, solved))}; raise it")
    num_parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    say(_STAGE, f"{config.model.base} with {num_parameters:,} parameters, {len(examples):,} examples")
    if checkpoint.is_padded:
        say(_STAGE, checkpoint.cost_of_padding())
    if len(examples) < len(solved):
        say(_STAGE, f"{len(solved) - len(examples):,} examples are longer than {config.max_tokens} tokens and left out")
    return examples


def _policy_and_curves(
    config: TrainSFTConfig, checkpoint: Checkpoint, resumption: Resumption
) -> tuple[Policy, list[dict[str, float]]]:
    """Return the model in training, and the rows of the finished steps; as `resumption` saved them, if it did."""
    add_adapters(checkpoint.model, config.engine.lora, seed=config.seed)
    model = LogprobModel(checkpoint.model, temperature=1.0, with_entropy=False)
    saved = resumption.load()
    if saved is None:
        return Policy(model, config.engine), []
    policy = Policy(model, config.engine, saved.policy)
    resumption.restore_random_state()
    return policy, saved.values["curves"]


def _step(
    config: TrainSFTConfig, checkpoint: Checkpoint, policy: Policy, examples: Sequence[TokenSequence], step: int
) -> dict[str, float]:
    """Take step `step` (from 1) on the mean negative log-likelihood of the solutions' tokens; return its metrics."""
    num_tokens = sum(example.num_sampled for example in examples)
    shard = pack_shard(
        policy.ranks,
        examples,
        max_tokens=config.engine.micro_batch_tokens,
        device=checkpoint.device,
        indices=range(len(examples)),
        padded=checkpoint.is_padded,
    )
    for batch in shard.batches:
        policy.learn(batch, lambda scores, _: -scores.logprobs_N.sum() / num_tokens)
    for batch in shard.dummies:  # other processes have more micro-batches, and wait for as many passes here
        policy.learn(batch, lambda scores, _: 0.0 * scores.logprobs_N.sum())
    return policy.step(
        learning_rate(
            step - 1,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            num_steps=config.num_steps,
            final_fraction=config.final_learning_rate_fraction,
            schedule=config.schedule,
        )
    )


def _batches(examples: Sequence[TokenSequence], size: int, *, seed: int) -> Iterator[list[TokenSequence]]:
    """Yield batches without end; each epoch has another random order."""
    order = random.Random(seed)
    queue: list[TokenSequence] = []
    while True:
        while len(queue) < size:
            queue.extend(order.sample(list(examples), len(examples)))
        yield queue[:size]
        queue = queue[size:]
