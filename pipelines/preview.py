"""`grpo-pipeline preview`: samples as the first GRPO step would, and prints whether it could learn from that."""

import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from textwrap import indent

import transformers

from components.environments.pool import Environments
from components.grading.verifier import Verdict, Verifier
from components.policy.checkpoint import Checkpoint, create, load
from components.policy.engine import torch_dtype
from components.policy.logprobs import LogprobModel
from components.policy.packing import pack
from components.preflight.config import Params
from components.prepare_data.difficulty import Measured, PassRate, question_digest, read_pass_rates
from components.prepare_data.prepare import prepare
from components.report.formatting import duration
from components.rollout.sampler import Sampling, grade_completions
from components.rollout.transformers_sampler import TransformersSampler
from components.shared import jsonl, lineage
from components.shared.errors import PipelineError
from components.shared.model import holds_model, local_model, model_file
from components.shared.problem import Problem, Split, draw, read_problems
from components.shared.progress import progress
from components.train_grpo.config import TrainGRPOConfig
from components.train_grpo.metrics import is_unanswered
from components.train_grpo.monitoring import first_look
from components.train_grpo.rollouts import rewards_differ
from components.train_grpo.scoring import Group, ScoredCompletion, Scorer
from pipelines.limits import first_prompt
from pipelines.run.history import OUTPUTS, read_run
from pipelines.run.screen import printable
from pipelines.run.settings import load as load_params

_BAR_WIDTH = 40
_SHOWN_CHARACTERS = 600
_NUM_PROBLEMS, _BATCH_SIZE, _MAX_SAMPLING_S = 32, 8, 45.0
"""Problems in all and at once, and the time after which no more are sampled: a preview takes two minutes."""
_BACKWARD_INTERVAL = 8  # one in this many completions gets a backward pass, to estimate the time of an update


def preview(
    params: Path, settings: Sequence[str], model: str | None, *, problems: int | None, pass_rates: Path | None
) -> int:
    """Sample as GRPO would, print the results, and return 1 if nothing can be learned from them.

    `model` is a model folder of a stage, or a run, of which it takes the reference; by default the base model. With
    `pass_rates` it asks all train problems, or as many as `problems`, and adds their pass rates to that file instead.
    """
    run_params = load_params(params, settings)
    config = run_params.train_grpo
    if config.reward.model:
        raise PipelineError("preview: train_grpo.reward.model is trained during the run, so nothing can be scored yet")
    changes = {"difficulty": None} if pass_rates else {}  # the selection by difficulty needs the pass rates
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-preview-") as scratch:
        prepare(run_params.prepare_data.model_copy(update=changes), problems=Path(scratch))
        train = read_problems(Path(scratch), Split.TRAIN)
    sources = {name for name, weight in config.prompts.source_weights.items() if weight}  # empty: all sources
    candidates = [problem for problem in train if not sources or problem.source in sources]
    drawn = draw(candidates, problems or (None if pass_rates else _NUM_PROBLEMS), config.seed)
    print(f"\n{first_prompt(run_params, drawn)}\n")
    folder, sft, dtype = _model_folder(run_params, model), run_params.train_sft, torch_dtype(config.engine)
    transformers.logging.disable_progress_bar()
    checkpoint = load(folder, dtype=dtype) if folder else create(sft.model, train, seed=sft.seed, dtype=dtype)
    if pass_rates:
        measure_pass_rates(config, checkpoint, drawn, str(folder or sft.model.base), pass_rates)
        return 0
    started, groups = time.monotonic(), list[Group]()
    print(f"sampling {config.group_size} completions for each of {len(drawn)} problems", flush=True)
    with progress("preview", len(drawn), "problems") as bar:
        for batch in _sample(config, checkpoint, drawn, max_s=_MAX_SAMPLING_S):
            groups += batch
            bar.advance(len(batch))
    sampling_s = time.monotonic() - started
    if len(groups) < len(drawn):
        counts = f"{len(groups)} of {len(drawn)} problems"
        print(f"after {_MAX_SAMPLING_S:g} s {counts} have been asked: enough for a first look")
    for line in (*first_look(config, groups), "", *histogram(groups), "", *_lengths(groups)):
        print(line)
    print(_times(config, checkpoint, groups, sampling_s))
    for example in examples(groups):
        print(f"\n{example}")
    return print_verdict(config, groups)


def _model_folder(params: Params, model: str | None) -> Path | None:
    """Return the folder of the reference or model that `model` names; None for the base model."""
    base_model = params.train_sft.model
    if model is None:
        if base_model.scratch:
            raise PipelineError(
                f"preview: {base_model.base} knows nothing before it is fine-tuned; name a run that has fine-tuned it: "
                "--model outputs/latest"
            )
        if params.train_sft.num_steps:
            print("this is the base model; after fine-tuning, preview the run's reference: --model outputs/latest")
        return None
    path = Path(model)
    if not path.exists():  # the name of a run
        path = OUTPUTS / "latest" if model == "latest" else OUTPUTS / "runs" / model
    run = read_run(path.resolve())
    stage = run.stages.get("train_sft") if run else None
    folder = stage.outputs["reference"] if stage and stage.finished else path
    if not holds_model(folder):
        raise PipelineError(f"preview: {model}: neither a run that has fine-tuned nor a model that a stage has saved")
    return folder


def measure_pass_rates(
    config: TrainGRPOConfig, checkpoint: Checkpoint, problems: Sequence[Problem], model: str, path: Path
) -> None:
    """Add the pass rates of problems that a file lacks; PipelineError if it is of another model or other settings."""
    local, sampling = Path(local_model(model)), config.sampling
    # A model in the hub's cache is identified by its commit, the name of the folder.
    digest = lineage.digest(local) if local.exists() else model_file(model, "config.json").parent.name
    temperature, max_new_tokens = sampling.temperature, sampling.max_new_tokens
    measured = Measured(model=model, digest=digest, temperature=temperature, max_new_tokens=max_new_tokens)
    rates: Mapping[str, float] = {}
    if path.exists():
        before, rates = read_pass_rates(path)
        if before != measured:
            raise PipelineError(f"{path}: was measured with {before}, not {measured}; name another file")
    else:
        jsonl.write_rows(path, [measured.model_dump()])
    missing = [each for each in problems if question_digest(each) not in rates]
    with path.open("a", encoding="utf-8") as file, progress("preview", len(missing), "problems") as bar:
        for groups in _sample(config, checkpoint, missing):
            for group in groups:
                digest, size = question_digest(group.problem), config.group_size
                file.write(PassRate(question=digest, right=group.num_right, samples=size).model_dump_json() + "\n")
            file.flush()
            bar.advance(len(groups))
    _, rates = read_pass_rates(path)
    num_mixed = sum(0 < rates[question_digest(each)] < 1 for each in problems)
    result = f"{num_mixed} of {len(problems)} problems are answered right now and then"
    print(f"{path}: {result}; to train on those alone, set")
    print(f"prepare_data: {{difficulty: {{pass_rates: {path}}}}}")


def _sample(
    config: TrainGRPOConfig, checkpoint: Checkpoint, problems: Sequence[Problem], *, max_s: float = math.inf
) -> Iterator[Sequence[Group]]:
    """Yield groups of scored completions in batches, small ones first, until the problems end or `max_s` is over."""
    tools = checkpoint.format.tools
    with Verifier() as verify, closing(Environments(tools)) if tools else nullcontext() as environments:
        sampling = Sampling(
            num_samples=config.group_size,
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=config.seed,
            environments=environments,
        )
        sampler = TransformersSampler(checkpoint, config.sampling.max_batch_size)
        score = Scorer(config, checkpoint, partial(grade_completions, verify))
        started, start, size = time.monotonic(), 0, 1
        while (batch := problems[start : start + size]) and time.monotonic() - started <= max_s:
            yield score(batch, sampler.generate(batch, sampling))
            start, size = start + size, min(2 * size, _BATCH_SIZE)


def histogram(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a line for each possible number of right completions in a group, with the number of such groups."""
    counts = Counter(group.num_right for group in groups)
    size = max(len(group.scored_G) for group in groups)
    yield f"groups by how many of their {size} answers are right (if none or all are, accuracy teaches nothing):"
    for right in range(size + 1):
        bar = "#" * math.ceil(_BAR_WIDTH * counts[right] / len(groups))
        yield f"{right:>4} {counts[right]:>4} {bar}".rstrip()


def _lengths(groups: Sequence[Group]) -> Iterator[str]:
    """Yield a line about the lengths of completions, and one for each frequent reason why there was no answer."""
    scored = [each for group in groups for each in group.scored_G]
    lengths = sorted(each.completion.num_tokens for each in scored)
    yield f"completion tokens: median {statistics.median_low(lengths)}, maximum {lengths[-1]}"
    reasons = Counter(each.grade.why for each in scored if is_unanswered(each))
    yield from (f"reason for no answer in {number} of {len(scored)}: {why}" for why, number in reasons.most_common(3))


def _times(config: TrainGRPOConfig, checkpoint: Checkpoint, groups: Sequence[Group], sampling_s: float) -> str:
    """Return how long a step and the run would take: sampling was timed, and a part of an update is timed here."""
    sequences = [each.completion.tokens for group in groups for each in group.scored_G]
    timed = sequences[: max(1, len(sequences) // _BACKWARD_INTERVAL)]
    limit = config.engine.micro_batch_tokens
    batches = pack(timed, max_tokens=limit, device=checkpoint.device, padded=checkpoint.is_padded)
    model = LogprobModel(checkpoint.model, temperature=config.sampling.temperature)
    started = time.monotonic()
    for batch in batches:
        model(batch).logprobs_N.sum().backward()
    update_s = (time.monotonic() - started) * len(sequences) / len(timed) * config.updates_per_rollout
    scale = config.prompts_per_step * config.group_size / len(sequences)
    step_s = scale * (sampling_s + update_s) / config.engine.num_processes
    tokens = sum(each.completion.num_tokens for group in groups for each in group.scored_G)
    run = f"the run's {config.num_steps} steps {duration(config.num_steps * step_s)}"
    return (
        f"sampled {tokens / sampling_s:.0f} tokens per s; on this machine a step of {config.prompts_per_step} prompts "
        f"would take about {duration(step_s)}, and {run}"
    )


def examples(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the first right completion, the first wrong one, and the first truncated or unanswered one, if any."""
    kinds: tuple[Callable[[ScoredCompletion], bool], ...] = (
        lambda each: each.grade.verdict is Verdict.RIGHT,
        lambda each: each.grade.verdict is Verdict.WRONG and each.completion.finished and not is_unanswered(each),
        lambda each: not each.completion.finished or is_unanswered(each),
    )
    every = [(group.problem, scored) for group in groups for scored in group.scored_G]
    for is_of_kind in kinds:
        first = next((each for each in every if is_of_kind(each[1])), None)
        if first is None:
            continue
        problem, scored = first
        text = printable(scored.completion.text)
        if len(text) > _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]} [...]"
        heading = f"{problem.id}, expected {_in_one_line(problem.answer)}"
        if scored.grade.extracted:
            heading += f", answered `{_in_one_line(scored.grade.extracted)}`"
        reason = "truncated" if scored.completion.truncated else scored.grade.why
        yield f"{heading}: {scored.grade.verdict} ({reason})\n{indent(text, '    ', lambda _: True)}"


def _in_one_line(answer: str) -> str:
    """Return the beginning of an answer, which may be a program or unit tests."""
    return " ".join(printable(answer).split())[:80]


def print_verdict(config: TrainGRPOConfig, groups: Sequence[Group]) -> int:
    """Print whether the policy can learn from these groups; return 0, or 1 if the rewards of each group are equal."""
    num_different = sum(rewards_differ(config, group) for group in groups)
    if num_different:
        num_mixed = sum(0 < group.num_right < len(group.scored_G) for group in groups)
        signal = f"rewards differ in {num_different} of {len(groups)} groups, and GRPO can learn from these"
        print(f"\n{signal}; the verdicts differ in {num_mixed}")
        return 0
    print(f"\nnothing to learn from: the rewards of each of the {len(groups)} groups are equal")
    return 1
