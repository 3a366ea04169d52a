"""A params file as one typed object, and the checks that compare its sections."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from components.cluster.config import ClusterConfig
from components.evaluate.config import EvaluateConfig
from components.evaluate.protocols import PROTOCOLS
from components.prepare_data.config import PrepareConfig
from components.prepare_data.source import FileSource
from components.register.config import RegisterConfig
from components.report.config import ReportConfig
from components.report.power import weakness
from components.shared.config import (
    HOLDS_SECRET,
    Config,
    keys_with_secrets,
    named,
    problems,
    read_params,
    shared_keys,
    with_shared_keys,
    without_operational,
)
from components.shared.deployment import DeploymentConfig
from components.shared.errors import raise_all
from components.shared.problem import Split
from components.shared.tools import ToolsConfig
from components.shared.versioning import is_url
from components.train_grpo.config import TrainGRPOConfig
from components.train_sft.config import TrainSFTConfig
from components.validate_data.config import ValidateConfig

Sections = dict[str, dict[str, Any]]
"""Sections as JSON, by name."""

TOOLS = "train_sft.model.tools"

with warnings.catch_warnings():
    # The field shadows a class method of pydantic models, `register` from abc, which nothing here needs.
    warnings.filterwarnings("ignore", message='Field name "register"')

    class Params(Config):
        """A section for each stage in running order, and two for runs on a cluster."""

        prepare_data: PrepareConfig
        validate_data: ValidateConfig
        train_sft: TrainSFTConfig
        train_grpo: TrainGRPOConfig = TrainGRPOConfig()
        evaluate: EvaluateConfig = EvaluateConfig()
        report: ReportConfig = ReportConfig()
        register: RegisterConfig = RegisterConfig()
        cluster: ClusterConfig = ClusterConfig()
        deployment: DeploymentConfig = DeploymentConfig()

        @model_validator(mode="before")
        @classmethod
        def _take_shared_keys(cls, sections: Any) -> Any:
            """Fill in the keys that sections take from other ones."""
            if not isinstance(sections, dict):
                return sections
            filled = {
                name: with_shared_keys(model, sections.get(name, {}), sections) for name, model in _MODELS.items()
            }
            return {**sections, **{name: section for name, section in filled.items() if section or name in sections}}

        @model_validator(mode="after")
        def _validation_uses_the_trained_model(self) -> "Params":
            if self.validate_data.model != self.train_sft.model:
                raise ValueError("validate_data.model and train_sft.model must be the same")
            return self

        @property
        def evaluation_tools(self) -> ToolsConfig | None:
            """The environment of evaluation: its own if set, else that of the protocol's prompt or of training."""
            protocol = PROTOCOLS[self.evaluate.protocol]
            return self.evaluate.tools or (protocol.tools if protocol.prompt else self.train_sft.model.tools)


CLUSTER, DEPLOYMENT, ALL_SECTIONS = "cluster", "deployment", "params"  # the last: a file of `write_sections`
STAGES = tuple(name for name in Params.model_fields if name not in {CLUSTER, DEPLOYMENT})
"""The stages of the graph in running order; each has a section of the same name."""
_MODELS: dict[str, Any] = {name: field.annotation for name, field in Params.model_fields.items()}
SHARED_KEYS = tuple((name, key) for name, model in _MODELS.items() for key in shared_keys(model))
"""Section and name of each key that may be omitted, as it is then taken from another section."""


def load_params(path: Path) -> Params:
    """Return the validated params in a file; a PipelineError lists all errors in them."""
    values = read_params(path)
    raise_all(wrong_params(values, path))
    return Params.model_validate(values)


def wrong_params(values: Sections, path: Path | None = None, settings: Sequence[str] = ()) -> list[str]:
    """Return a line for each error in a params file, with its place in `path`, or `--set` for keys in `settings`."""
    by = "--set " if settings else ""  # `read_params` refuses secrets in files
    secrets = [f"{by}{named(keys)}: {HOLDS_SECRET}" for keys in keys_with_secrets(dict(values))]
    errors = problems(Params, values, name="", path=path, settings=settings)
    # A key that is taken from another section repeats the errors there.
    repeated = [f"{section}.{key}" for section, key in SHARED_KEYS if key not in values.get(section, {})]
    return secrets + [line for line in errors if not any(key in line for key in repeated)]


def stage_sections(params: Params) -> Sections:
    """Return the sections of all stages with every key, as JSON, but without nulls, which KFP cannot pass."""
    return params.model_dump(mode="json", exclude_none=True, include=set(STAGES))


def as_yaml(params: Params) -> str:
    """Return params as a self-contained params file: it extends no other file and relies on no default."""
    return _dump(params.model_dump(mode="json", include={*STAGES, *params.model_fields_set}))


def write_sections(params: Params, folder: Path) -> None:
    """Write a params file with every key, and `<stage>.yaml` for each stage, with the keys that change its results."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{ALL_SECTIONS}.yaml").write_text(as_yaml(params), encoding="utf-8")
    for stage in STAGES:
        text = _dump({stage: without_operational(getattr(params, stage))})
        (folder / f"{stage}.yaml").write_text(text, encoding="utf-8")


def _dump(values: Sections) -> str:
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return text


def contradictions(params: Params, data: Path | None = None) -> list[str]:
    """Return a line for each contradiction between sections; if there is none, one for a gate of too little power."""
    checks = (_empty_splits, _unknown_sources, _too_few_problems, _training_conflicts, _protocol_conflicts)
    lines = [line for check in checks for line in check(params)]
    if lines or not _must_have_power(params):
        return lines
    return [f"{line}; report.gate.power: warn runs it all the same" for line in _weak_gate(params, data)]


def advisories(params: Params, data: Path | None = None) -> list[str]:
    """Return a warning for each setting without effect, and for a gate of too little power if the params allow it."""
    return [*params.train_grpo.without_effect(), *([] if _must_have_power(params) else _weak_gate(params, data))]


def _must_have_power(params: Params) -> bool:
    return params.report.gate.enforce and params.report.gate.power == "refuse"


def exceeded_limits(params: Params, context: int) -> Iterator[str]:
    """Yield a line for each limit that allows more tokens than the base model's `context`."""
    model, prompt_tokens = params.train_sft.model, params.validate_data.max_prompt_tokens
    base, evaluation_tools = model.base, params.evaluation_tools
    evaluation_section = TOOLS if evaluation_tools == model.tools else "evaluate.tools"
    limits = {
        "train_grpo.sampling.max_new_tokens": (params.train_grpo.sampling.max_new_tokens, model.tools, TOOLS),
        "evaluate.max_new_tokens": (params.evaluate.max_new_tokens, evaluation_tools, evaluation_section),
    }
    for key, (new_tokens, tools, section) in limits.items():
        from_environment = tools.max_environment_tokens if tools else 0
        if prompt_tokens + new_tokens + from_environment > context:
            yield (
                f"{key}: {new_tokens:,} tokens after a prompt of up to {prompt_tokens:,} "
                f"(validate_data.max_prompt_tokens){_and_observations(tools, section)} are more than the {context:,} "
                f"that {base} reads"
            )
    if params.train_sft.num_steps and params.train_sft.max_tokens > context:
        yield f"train_sft.max_tokens: is {params.train_sft.max_tokens:,}, and {base} reads {context:,} tokens"


def _and_observations(tools: ToolsConfig | None, section: str) -> str:
    """Return the part of an error that names the tokens of an environment; empty without an environment."""
    if tools is None:
        return ""
    limit = f"{tools.max_observation_tokens:,} ({section}.max_observation_tokens)"
    return f" and {tools.max_turns - 1} answers of the environment of up to {limit}"


def is_about_limits(line: str) -> bool:
    """Tell whether an error is about a limit in tokens that `grpo-pipeline limits` can propose."""
    return any(f".{key}: " in line for key in ("max_prompt_tokens", "max_new_tokens", "max_tokens"))


def _sources(params: Params, split: Split) -> list[str]:
    """Return the names of the sources with problems of a split; also of those that may have some."""
    return [source.name for source in params.prepare_data.sources if source.max_problems(split) != 0]


def _empty_splits(params: Params) -> Iterator[str]:
    """Yield a line for each split that a run needs and no source has."""
    keys = {Split.TRAIN: "`train`", Split.TEST: "`test`, `test_fraction`", Split.DEV: "`dev_fraction`"}
    for split in dict.fromkeys((Split.TRAIN, Split.TEST, params.evaluate.split)):
        if not _sources(params, split):
            yield f"prepare_data.sources: no source has {split} problems; set {keys[split]} or `num_{split}` of one"


def _unknown_sources(params: Params) -> Iterator[str]:
    """Yield a line for each key that names a source without problems of its split, and for each missing weight."""
    weights = params.train_grpo.prompts.source_weights or {}
    names_by_key: list[tuple[str, Split, Iterable[str]]] = [
        ("report.gate.target", params.evaluate.split, params.report.gate.target),
        ("train_grpo.prompts.source_weights", Split.TRAIN, weights),
        ("train_grpo.reward.by_source", Split.TRAIN, params.train_grpo.reward.by_source),
    ]
    for key, split, names in names_by_key:
        sources = _sources(params, split)
        known = ", ".join(sources) or "none"
        for name in (name for name in names if name not in sources):
            if isinstance(names, Mapping):  # perhaps in a file that is extended
                yield f"{key}.{name}: not a source of {split} problems (null removes it); sources: {known}"
            else:
                yield f'{key}: no {split} problem comes from "{name}"; sources with {split} problems: {known}'
    all_sources = [source.name for source in params.prepare_data.sources]
    for name in params.train_sft.model.prompts:
        if name not in all_sources:
            yield f'train_sft.model.prompts: no problem comes from "{name}"; sources: {", ".join(all_sources)}'
    for name in _sources(params, Split.TRAIN):
        if weights and name not in weights:
            advice = "give it one (0 leaves it out)"
            yield f'train_grpo.prompts.source_weights: "{name}" has train problems and no weight; {advice}'


def _weak_gate(params: Params, data: Path | None) -> Iterator[str]:
    """Yield a line if the gate has too little power with the problems of the sources, whose files are in `data`."""
    split, sizes = params.evaluate.split, dict[str, int]()
    for source in params.prepare_data.sources:
        size = source.expected_problems(split, data) if isinstance(source, FileSource) else source.max_problems(split)
        if size is None:  # not known before the data are read
            return
        if size > 0:
            sizes[source.name] = size
    if not set(params.report.gate.target) <= set(sizes):
        return
    total, limit = sum(sizes.values()), params.evaluate.limit
    if limit and limit < total:  # a random subset, with about the same part of each source
        sizes = {source: max(1, size * limit // total) for source, size in sizes.items()}
    if line := weakness(params.report.gate, sizes):
        yield line


def _too_few_problems(params: Params) -> Iterator[str]:
    """Yield a line for each key that requires more problems than the sources can have."""
    minimums = {
        "validate_data.min_train_rows": (Split.TRAIN, params.validate_data.min_train_rows),
        "validate_data.min_test_rows": (Split.TEST, params.validate_data.min_test_rows),
        "train_grpo.prompts_per_step": (Split.TRAIN, params.train_grpo.prompts_per_step),
    }
    for key, (split, minimum) in minimums.items():
        sizes = [source.max_problems(split) for source in params.prepare_data.sources]
        total = sum(size for size in sizes if size is not None)
        if None not in sizes and 0 < total < minimum:  # None is unknown, and `_empty_splits` reports 0
            yield f"{key}: is {minimum:,}, and prepare_data.sources has at most {total:,} {split} problems"


def _protocol_conflicts(params: Params) -> Iterator[str]:
    """Yield a line for each source that the evaluation protocol does not allow, or if no source has its examples."""
    name, split = params.evaluate.protocol, params.evaluate.split
    protocol = PROTOCOLS[name]
    allowed = " or ".join(protocol.sources)
    for source in _sources(params, split):
        if protocol.sources and source not in protocol.sources:
            yield f"evaluate.protocol: {name} asks problems from {allowed}, and {source} has {split} problems, too"
    if protocol.num_shots and not set(_sources(params, Split.TRAIN)) & set(protocol.sources):
        yield f"evaluate.protocol: {name} shows solved examples, and no train problem comes from {allowed}"


def _training_conflicts(params: Params) -> Iterator[str]:
    """Yield a line for each setting of GRPO that its data, environment or sampler rules out, or for missing storage."""
    reward, train_sources = params.train_grpo.reward, _sources(params, Split.TRAIN)
    for source in params.prepare_data.sources:
        is_used = source.name in train_sources and "code_tests" in reward.weights_of(source.name)
        if is_used and source.kind != "mbpp":
            key = f"by_source.{source.name}" if source.name in reward.by_source else "weights"
            yield (
                f"train_grpo.reward.{key}.code_tests: problems from {source.name} have no unit tests; "
                "leave it out, `accuracy` judges both kinds"
            )
    uses = {"weights.environment": "environment" in reward.names, "supervision": reward.supervision == "turn"}
    for key, needs_environment in uses.items():
        if needs_environment and params.train_sft.model.tools is None:
            yield f"train_grpo.reward.{key}: needs an environment: set {TOOLS}, or remove this key"
    if params.train_grpo.validation and not _sources(params, Split.DEV):
        yield (
            "train_grpo.validation: no source has dev problems; hold some out, such as `dev_fraction: 0.05` "
            "(`num_dev: 200` of word_problems) in one of prepare_data.sources, or set train_grpo.validation: null"
        )
    model, sampler = params.train_sft.model, params.train_grpo.sampler
    engine = sampler.vllm or sampler.servers
    max_tokens = params.validate_data.max_prompt_tokens + params.train_grpo.sampling.max_new_tokens
    max_tokens += model.max_environment_tokens
    if engine and engine.max_tokens < max_tokens:
        key = f"train_grpo.sampler.{'vllm' if sampler.vllm else 'servers'}.max_tokens"
        yield (
            f"{key}: is {engine.max_tokens:,}; a prompt (validate_data.max_prompt_tokens) with its completion "
            f"(train_grpo.sampling.max_new_tokens){_and_observations(model.tools, TOOLS)} takes up to {max_tokens:,}"
        )
    if is_url(params.register.registry) and not params.register.storage:
        yield "register.storage: is not set, and a registry at a URL has no place for weights; name a DVC remote"
