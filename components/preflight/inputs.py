"""What can be known of a run before its first stage: keys that contradict one another, and things that are not there.

Everything is collected, so that one attempt shows all there is to correct.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from components.grading.verifier import Verifier, require_sandbox
from components.preflight.config import Params
from components.preflight.git_remote import references
from components.preflight.side_by_side import Check, side_by_side
from components.preflight.storage import is_url
from components.prepare_data.config import PrepareConfig
from components.prepare_data.source import FileSource, MalformedRowError, raw_rows
from components.register.catalogue import Catalogue
from components.shared.errors import PipelineError
from components.shared.model import context_tokens, model_config
from components.shared.problem import Split
from components.train_grpo import own_reward
from components.train_grpo.config import RewardName, TrainGRPOConfig, is_own

BASE_MODEL, REWARD_MODEL = "train_sft.model.base", "train_grpo.reward.model.base"
_DEADLINE_S = 30.0
_ROWS_TRIED = 20
"""From the beginning of each file: enough to see that it is of another format."""


def contradictions(params: Params) -> list[str]:
    """Return a line for each pair of keys in different sections that cannot both hold; asks nothing of anybody."""
    return [line for rule in (_splits, _gate, _sizes, _shares, _unit_tests, _sampler) for line in rule(params)]


def missing_here(params: Params, *, containers: bool = False) -> list[str]:
    """Return a line for each thing that a run on this machine needs and would not find.

    With `containers` its stages run in their images, which may hold more than this environment.
    What is looked up elsewhere (repositories, the hub) is asked for side by side, and has half a minute to answer.
    """
    answers = side_by_side(_lookups(params), _DEADLINE_S)
    context = answers[BASE_MODEL]
    return [
        *_files(params.prepare_data),
        *(f"{key}: {answer}" for key, answer in answers.items() if isinstance(answer, PipelineError)),
        *(limits(params, context) if isinstance(context, int) else []),
        *own_reward.unusable(own_rewards(params.train_grpo), trained_here=not containers),
        *([] if containers else _sandbox(params)),
        *_registry(params),
    ]


def _lookups(params: Params) -> dict[str, Check]:
    """What is asked of others, by the key that names it; the answer to the base model is its context, in tokens."""
    register, repository = params.register, params.prepare_data.repository
    checks = base_models(params)
    if repository:
        checks["prepare_data.repository.url"] = partial(references, repository.url)
    if is_url(register.registry):
        checks["register.registry"] = partial(references, register.registry)
    if register.model_registry:
        checks["register.model_registry"] = partial(Catalogue, register.model_registry)
    return checks


def base_models(params: Params) -> dict[str, Check]:
    """Return a check for each model that a run starts from, by its key.

    That of the model to train returns its context in tokens, or None where that is not known.
    """
    judge = params.train_grpo.reward.model
    checks: dict[str, Check] = {BASE_MODEL: partial(context_tokens, params.train_sft.model.base)}
    if judge and judge.base != "reference":
        checks[REWARD_MODEL] = partial(model_config, judge.base)
    return checks


def _sources(params: Params, split: Split) -> list[str]:
    return [source.kind for source in params.prepare_data.sources if source.max_problems(split) != 0]


def _splits(params: Params) -> Iterator[str]:
    for split in Split:
        if not _sources(params, split):
            yield f"prepare_data.sources: no source has {split} problems; set `{split}` or `num_{split}` of one"


def _gate(params: Params) -> Iterator[str]:
    there = _sources(params, Split.TEST)
    for name in params.report.gate.target:
        if name not in there:
            yield (
                f'report.gate.target: no test problem comes from "{name}"; '
                f"sources with test problems: {', '.join(there) or 'none'}"
            )


def _sizes(params: Params) -> Iterator[str]:
    """Numbers of problems that are asked for, where fewer can be had whatever the files hold."""
    asked = {
        "validate_data.min_train_rows": (Split.TRAIN, params.validate_data.min_train_rows),
        "validate_data.min_test_rows": (Split.TEST, params.validate_data.min_test_rows),
        "train_grpo.prompts_per_step": (Split.TRAIN, params.train_grpo.prompts_per_step),
    }
    for key, (split, number) in asked.items():
        most = [source.max_problems(split) for source in params.prepare_data.sources]
        total = sum(each for each in most if each is not None)
        if None not in most and 0 < total < number:
            yield f"{key}: is {number:,}, and prepare_data.sources has at most {total:,} {split} problems"


def _shares(params: Params) -> Iterator[str]:
    weights, there = params.train_grpo.prompts.source_weights, _sources(params, Split.TRAIN)
    key = "train_grpo.prompts.source_weights"
    if not weights:
        return
    for name in sorted(set(weights) - set(there)):
        yield f'{key}: no train problem comes from "{name}"; sources with train problems: {", ".join(there) or "none"}'
    for name in there:
        if name not in weights:
            yield f'{key}: "{name}" has train problems and no weight; give it one (0 leaves it out)'


def _unit_tests(params: Params) -> Iterator[str]:
    others = [source for source in _sources(params, Split.TRAIN) if source != "mbpp"]
    if RewardName.CODE_TESTS in params.train_grpo.reward.weights and others:
        yield (
            f"train_grpo.reward.weights.code_tests: problems from {others[0]} have no unit tests; "
            "leave it out, `accuracy` judges both kinds"
        )


def _sampler(params: Params) -> Iterator[str]:
    sampler = params.train_grpo.sampler
    engine = sampler.vllm or sampler.servers
    needed = params.validate_data.max_prompt_tokens + params.train_grpo.sampling.max_new_tokens
    if engine and engine.max_tokens < needed:
        key = "train_grpo.sampler." + ("vllm" if sampler.vllm else "servers")
        yield (
            f"{key}.max_tokens: is {engine.max_tokens:,}; a prompt (validate_data.max_prompt_tokens) with its "
            f"completion (train_grpo.sampling.max_new_tokens) takes up to {needed:,}"
        )


def limits(params: Params, context: int) -> Iterator[str]:
    """Yield a line for each limit that lets more tokens through than the base model reads (`context`)."""
    prompt = params.validate_data.max_prompt_tokens
    completions = {
        "train_grpo.sampling.max_new_tokens": params.train_grpo.sampling.max_new_tokens,
        "evaluate.max_new_tokens": params.evaluate.max_new_tokens,
    }
    base = params.train_sft.model.base
    for key, tokens in completions.items():
        if prompt + tokens > context:
            yield (
                f"{key}: {tokens:,} tokens after a prompt of up to {prompt:,} (validate_data.max_prompt_tokens) "
                f"are more than the {context:,} that {base} reads"
            )
    if params.train_sft.max_tokens > context:
        yield f"train_sft.max_tokens: is {params.train_sft.max_tokens:,}, and {base} reads {context:,} tokens"


def _files(config: PrepareConfig) -> Iterator[str]:
    if config.repository:
        return
    with Verifier() as verify:
        for index, source in enumerate(config.sources):
            if not isinstance(source, FileSource):
                continue
            for split in Split:
                path = source.path(split)
                wrong = path and _unreadable(path, source, verify)
                if wrong:
                    yield f"prepare_data.sources.{index}.{split}: {wrong}"


def _unreadable(path: Path, source: FileSource, verify: Verifier) -> str | None:
    """Say why a raw file cannot be used, as far as its first rows show."""
    reasons = []
    try:
        rows = list(islice(raw_rows(path), _ROWS_TRIED))
    except PipelineError as error:
        return str(error)
    for row in rows:
        try:
            source.read_row(row.columns(), verify)
        except MalformedRowError as error:
            reasons.append(f"{row.path}:{row.line}: {error}")
    if not rows:
        return f"{path}: contains no row"
    if len(reasons) == len(rows):
        return f"{path}: none of its first {len(rows)} rows can be used; {reasons[0]}"
    return None


def own_rewards(config: TrainGRPOConfig) -> list[str]:
    """Return the rewards that are the user's own."""
    return [name for name in config.reward.weights if is_own(name)]


def _sandbox(params: Params) -> Iterator[str]:
    if any(source.kind == "mbpp" for source in params.prepare_data.sources):
        try:
            require_sandbox()
        except PipelineError as error:
            yield f"prepare_data.sources: mbpp has code to run: {error}"


def _registry(params: Params) -> Iterator[str]:
    config = params.register
    if is_url(config.registry) and config.storage is None:
        yield "register.storage: is null, and a registry at a URL has no place for weights; name a DVC remote"
    if not is_url(config.registry) and Path(config.registry).exists() and not Path(config.registry).is_dir():
        yield f"register.registry: {config.registry} is not a folder"
