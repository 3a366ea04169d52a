"""Supervised fine-tuning in one process, or in one of several that train together."""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from components.policy.checkpoint import Checkpoint, create, save, save_base
from components.policy.curves import write_curves
from components.policy.dealing import deal
from components.policy.determinism import make_deterministic
from components.policy.engine import PolicyEngine, dtype_of
from components.policy.logprobs import CompletionScorer, disable_dropout
from components.policy.lora import adapt
from components.policy.memory import memory_for_loading, memory_for_update
from components.policy.optimizer_state import load_weights
from components.policy.ranks import join
from components.policy.resumption import Resumption
from components.policy.schedule import learning_rate
from components.policy.sequences import TokenSequence
from components.policy.stopping import Stop, heeded
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import progress, say
from components.train_sft.config import TrainSFTConfig

_STAGE = "train_sft"


def train_rank(
    config: TrainSFTConfig, *, problems: Path, base_model: Path, reference: Path, training: Path, work: Path
) -> dict[str, float]:
    """Take this process's part in the training; the first process writes what comes of it."""
    make_deterministic(config.seed)
    training_problems = read_problems(problems, Split.TRAIN)
    ranks = join(config.engine)
    with ranks.naming_the_lost(), heeded(config.checkpoint.grace_s) as stop:
        resumption = Resumption(ranks, work, config.checkpoint, stage=_STAGE, num_steps=config.num_steps)
        with memory_for_loading(_STAGE, config.engine):
            checkpoint = create(config.model, training_problems, seed=config.seed, dtype=dtype_of(config.engine))
        if ranks.first:
            save_base(checkpoint, base_model)
        examples = _examples(config, checkpoint, training_problems)
        with memory_for_loading(_STAGE, config.engine):
            engine, curves = _engine_and_curves(config, checkpoint, resumption)
        _train(config, checkpoint, engine, examples, curves, resumption, stop)
        with engine.whole_weights():
            if ranks.first:
                save(checkpoint, reference)
        if ranks.first:
            write_curves(training, curves)
        ranks.meet("the end")
    return {"loss": curves[-1]["loss"], "examples": len(examples), "left_out": len(training_problems) - len(examples)}


def _engine_and_curves(
    config: TrainSFTConfig, checkpoint: Checkpoint, resumption: Resumption
) -> tuple[PolicyEngine, list[dict[str, float]]]:
    """The model under training, and what is known of the steps done."""
    disable_dropout(checkpoint.model)
    adapt(checkpoint.model, config.engine.lora, seed=config.seed)
    scorer = CompletionScorer(checkpoint.model, temperature=1.0)
    saved = resumption.saved()
    if saved:
        load_weights(scorer, saved.policy)
    engine = PolicyEngine(scorer, config.engine)
    if saved:
        engine.restore(saved.policy)
        resumption.restore_random_numbers()
    return engine, saved.values["curves"] if saved else []


def _examples(config: TrainSFTConfig, checkpoint: Checkpoint, problems: Sequence[Problem]) -> list[TokenSequence]:
    """The problems as tokens, without those that are too long."""
    every = [checkpoint.example(problem) for problem in problems]
    fitting = [example for example in every if len(example) <= config.max_tokens]
    if not fitting:
        shortest = min(len(example) for example in every)
        raise PipelineError(f"no example fits max_tokens={config.max_tokens}: the shortest has {shortest} tokens")
    parameters = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    say(_STAGE, f"{config.model.base} with {parameters:,} parameters, {len(fitting):,} examples")
    if len(fitting) < len(every):
        say(_STAGE, f"{len(every) - len(fitting):,} examples are longer than {config.max_tokens} tokens and left out")
    return fitting


def _train(
    config: TrainSFTConfig,
    checkpoint: Checkpoint,
    engine: PolicyEngine,
    examples: Sequence[TokenSequence],
    curves: list[dict[str, float]],
    resumption: Resumption,
    stop: Stop,
) -> None:
    """Do the steps that are left, and add what there is to know of them to `curves`."""
    batches = islice(_batches(examples, config.examples_per_step, seed=config.seed), resumption.steps_done, None)
    with progress(_STAGE, config.num_steps) as shown:
        shown.skip(resumption.steps_done)
        for step in range(resumption.steps_done, config.num_steps):
            rate = learning_rate(
                step,
                peak=config.learning_rate,
                warmup_steps=config.warmup_steps,
                num_steps=config.num_steps,
                final_fraction=config.final_learning_rate_fraction,
            )
            batch = next(batches)
            with memory_for_update(_STAGE, config.engine):
                figures = _step(config, checkpoint, engine, batch, rate)
            epoch = (step + 1) * config.examples_per_step / len(examples)
            curves.append({"step": step + 1, **figures, "epoch": epoch})
            shown.advance(loss=figures["loss"], tokens_per_s=shown.rate(sum(len(example) for example in batch)))
            resumption.after_step(step + 1, engine, lambda: {"curves": curves}, stop=stop, score=-figures["loss"])


def _step(
    config: TrainSFTConfig,
    checkpoint: Checkpoint,
    engine: PolicyEngine,
    examples: Sequence[TokenSequence],
    rate: float,
) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the completion tokens of all `examples`."""
    num_tokens = sum(len(example.completion_ids) for example in examples)
    tokens, every = config.engine.micro_batch_tokens, range(len(examples))
    share = deal(engine.ranks, examples, max_tokens=tokens, device=checkpoint.device, chosen=every)
    for batch in share.batches:
        engine.accumulate(-engine(batch).logprobs_N.sum() / num_tokens)
    for batch in share.idle:
        engine.accumulate(0.0 * engine(batch).logprobs_N.sum())
    return engine.step(rate)


def _batches(examples: Sequence[TokenSequence], size: int, *, seed: int) -> Iterator[list[TokenSequence]]:
    """Yield batches for ever; every pass over the examples has its own order."""
    order = random.Random(seed)
    waiting: list[TokenSequence] = []
    while True:
        while len(waiting) < size:
            waiting.extend(order.sample(list(examples), len(examples)))
        yield waiting[:size]
        waiting = waiting[size:]
