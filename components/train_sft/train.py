"""Supervised fine-tuning of the base model on worked solutions: the reference checkpoint of GRPO."""

import random
from collections.abc import Iterator, Sequence

from components.policy.checkpoint import Checkpoint, create, save, save_base
from components.policy.curves import write_curves
from components.policy.determinism import make_deterministic
from components.policy.engine import PolicyEngine, dtype_of, refuse_several_processes
from components.policy.logprobs import CompletionScorer, disable_dropout
from components.policy.schedule import learning_rate
from components.policy.sequences import TokenSequence, micro_batches
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split, read_problems
from components.shared.progress import progress, say
from components.shared.step import In, Out
from components.train_sft.config import TrainSFTConfig

_STAGE = "train_sft"


def train(config: TrainSFTConfig, *, problems: In, base_model: Out, reference: Out, training: Out) -> dict[str, float]:
    """Fine-tune the base model on the training problems' solutions."""
    refuse_several_processes()
    make_deterministic(config.seed)
    training_problems = read_problems(problems, Split.TRAIN)
    checkpoint = create(config.model, training_problems, seed=config.seed, dtype=dtype_of(config.engine))
    save_base(checkpoint, base_model)
    examples = _examples(config, checkpoint, training_problems)
    disable_dropout(checkpoint.model)
    engine = PolicyEngine(CompletionScorer(checkpoint.model, temperature=1.0), config.engine)
    curves = _train(config, checkpoint, engine, examples)
    with engine.whole_weights():
        save(checkpoint, reference)
    write_curves(training, curves)
    return {"loss": curves[-1]["loss"], "examples": len(examples), "left_out": len(training_problems) - len(examples)}


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
    config: TrainSFTConfig, checkpoint: Checkpoint, engine: PolicyEngine, examples: Sequence[TokenSequence]
) -> list[dict[str, float]]:
    curves = []
    batches = _batches(examples, config.examples_per_step, seed=config.seed)
    with progress(_STAGE, config.num_steps) as shown:
        for step in range(config.num_steps):
            rate = learning_rate(
                step,
                peak=config.learning_rate,
                warmup_steps=config.warmup_steps,
                num_steps=config.num_steps,
                final_fraction=config.final_learning_rate_fraction,
            )
            batch = next(batches)
            figures = _step(config, checkpoint, engine, batch, rate)
            epoch = (step + 1) * config.examples_per_step / len(examples)
            curves.append({"step": step + 1, **figures, "epoch": epoch})
            shown.advance(loss=figures["loss"], tokens_per_s=shown.rate(sum(len(example) for example in batch)))
    return curves


def _step(
    config: TrainSFTConfig,
    checkpoint: Checkpoint,
    engine: PolicyEngine,
    examples: Sequence[TokenSequence],
    rate: float,
) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the completion tokens of all `examples`."""
    num_tokens = sum(len(example.completion_ids) for example in examples)
    for batch in micro_batches(examples, max_tokens=config.engine.micro_batch_tokens, device=checkpoint.device):
        engine.accumulate(-engine(batch).logprobs_N.sum() / num_tokens)
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
