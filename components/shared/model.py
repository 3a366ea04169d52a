"""The base model named in params, folders that hold a model, and folders that refer to one elsewhere."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from components.shared import durable, jsonl, lineage
from components.shared.answer_policy import AnswerPolicy
from components.shared.config import Config
from components.shared.errors import PipelineError
from components.shared.lineage import Material
from components.shared.tools import FeedbackArguments, ToolsConfig

PIPELINE_FILE = "pipeline.json"
"""File next to the weights with the `prompt_settings` of the model. In a folder that refers to a model, it also has the
folder or hub id of the weights ("weights") and their "digest" or "revision"."""
TOKENIZER_FILE = "tokenizer.json"
_CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length")
"""Names of the context length in different model families."""


@dataclass(frozen=True)
class ScratchModel:
    """A small Qwen3 from scratch, with a tokenizer built from the training problems."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocabulary_size: int | None = None
    """Entries of a byte-level BPE vocabulary; None reads whole words and whole numbers."""
    max_tokens: int = 512
    """Context length."""
    single_digits: bool = False
    """Whether a vocabulary of whole words has digits instead of whole numbers."""


NUM_SFT_STEPS = 500
"""Steps of fine-tuning by default."""
SCRATCH_MODELS = {
    "scratch:tiny": ScratchModel(hidden_size=64, num_layers=2, num_heads=4),
    "scratch:words": ScratchModel(hidden_size=128, num_layers=2, num_heads=4),
    "scratch:digits": ScratchModel(hidden_size=128, num_layers=2, num_heads=4, single_digits=True),
    "scratch:math": ScratchModel(hidden_size=128, num_layers=3, num_heads=4, vocabulary_size=2048, max_tokens=1024),
}


class ChatConfig(Config):
    """A conversation by the chat template of the model's own tokenizer, in which a user asks and the model answers."""

    system: str | None = None
    """System message before the question; null for the chat template's default, if it has one."""


def _require_question(prompt: str) -> str:
    if "{question}" not in prompt:
        raise ValueError("must contain `{question}`")
    return prompt


_Prompt = Annotated[str, AfterValidator(_require_question)]


class ModelConfig(Config):
    """Which model is post-trained, and how a question is put to it."""

    base: str = Field(min_length=1)
    """Hugging Face id or folder, a GGUF file, or `scratch:<preset>` for a small model that needs no download."""
    chat: ChatConfig | None = None
    """Chat in which the prompt, without surrounding white space, is the user message; `{}` for the defaults of the
    model's chat template; null for the text of the prompt alone."""
    thinking: bool | None = None
    """Value of `enable_thinking` for a chat template that knows it; null leaves it to the template."""
    prompt: _Prompt = "{question}\n"
    """Prompt of the model; `{question}` stands for the question. One with `<think>` asks for reasoning."""
    prompts: dict[str, _Prompt] = Field(default_factory=dict)
    """Prompts for single sources of problems, by the name of the source, in place of `prompt`."""
    answer: AnswerPolicy = AnswerPolicy.DECLARED
    """Where a response to this prompt has to state its final answer. If not set, it is `last_sentence` with `chat` and
    without `tools`: chat models end with a sentence."""
    tools: ToolsConfig | None = None
    """The environment in which the model answers in several turns; null for a single turn."""

    @model_validator(mode="before")
    @classmethod
    def _set_answer_of_chat(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("chat") is not None and values.get("tools") is None:
            return {"answer": AnswerPolicy.LAST_SENTENCE, **values}
        return values

    @field_validator("base")
    @classmethod
    def _check_preset(cls, base: str) -> str:
        if base.startswith("scratch:") and base not in SCRATCH_MODELS:
            raise ValueError(f"no such preset; accepted: {', '.join(SCRATCH_MODELS)}")
        return base

    @model_validator(mode="after")
    def _check_chat_and_tools(self) -> "ModelConfig":
        if self.chat is not None and self.scratch:
            raise ValueError("chat: a model made from scratch has no chat template; leave chat out")
        if self.thinking is not None and self.chat is None:
            raise ValueError("thinking: is for chat templates; set chat, such as `chat: {}`")
        if self.tools is None:
            return self
        if self.tools.call_format == "tool_call" and self.chat is None:
            raise ValueError("tools.call_format: tool_call is for chat templates; set chat, such as `chat: {}`")
        arguments = self.tools.arguments
        if self.tools.environment == "feedback" and FeedbackArguments(**arguments).answer is not self.answer:
            raise ValueError("tools.arguments.answer and answer must be the same")
        return self

    @property
    def scratch(self) -> ScratchModel | None:
        """The model to make from scratch, or None if `base` is an existing one."""
        return SCRATCH_MODELS.get(self.base)

    @property
    def max_environment_tokens(self) -> int:
        """Tokens that an environment may write between the turns of one answer; 0 without tools."""
        return self.tools.max_environment_tokens if self.tools else 0

    def asks_for_thoughts(self, source: str = "") -> bool:
        """Return whether the model is asked to reason between `<think>` and `</think>` before it answers."""
        texts = [self.prompts.get(source, self.prompt), self.chat.system if self.chat else None]
        return self.thinking is True or any("<think>" in text for text in texts if text)

    def ask(self, question: str, source: str = "") -> str:
        """Return the prompt for a question from a source of problems, before a chat template is applied."""
        return self.prompts.get(source, self.prompt).replace("{question}", question)


_PROMPT_KEYS = ("prompt", "answer", "chat", "thinking", "prompts", "tools")
"""Keys of `ModelConfig` that are saved next to the weights, if they are set."""


def prompt_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys about how a question is put to a model, from a dumped `ModelConfig` or a pipeline.json."""
    return {key: values[key] for key in _PROMPT_KEYS if values.get(key) not in (None, {})}


def require_model_folder(folder: Path) -> None:
    """Raise PipelineError unless a folder has the files of a model."""
    model_file(str(folder), _CONFIG)
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise PipelineError(f"model {folder}: holds no weights; one of {', '.join(_WEIGHTS)} is expected")


def context_tokens(base: str) -> int | None:
    """Return the context length of a base model in tokens, from its config alone; None if that does not have it."""
    if base in SCRATCH_MODELS:
        return SCRATCH_MODELS[base].max_tokens
    config = model_config(base)
    if Path(base).is_dir():
        model_file(base, TOKENIZER_FILE)  # an error if it is missing
    return context_tokens_of(config)


def context_tokens_of(config: Mapping[str, Any]) -> int | None:
    """Return the context length in a config.json, or None."""
    decoder = config.get("text_config") or config  # the language model of a multimodal one
    rope_type = (decoder.get("rope_parameters") or {}).get("rope_type", "default")
    if decoder.get("rope_scaling") or rope_type != "default":  # each kind extends the context differently
        return None
    return next((decoder[key] for key in _CONTEXT_KEYS if isinstance(decoder.get(key), int)), None)


def model_config(base: str) -> dict[str, Any]:
    """Return the config of a model in a folder or on the hub; PipelineError if there is no such model."""
    base = local_model(base)
    if Path(base).is_dir():
        require_model_folder(Path(base))
    config: dict[str, Any] = jsonl.read_json(model_file(base, _CONFIG))
    return config


def require_weights(base: str) -> None:
    """Raise PipelineError unless a model has its files, and the weights in a folder have the size of their header."""
    from safetensors import SafetensorError, safe_open

    model_config(base)
    for file in Path(local_model(base)).glob("*.safetensors"):  # none for a model on the hub
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            raise PipelineError(f"{file}: cannot be read ({error}); is the file truncated?") from None


def local_model(base: str) -> str:
    """Return the folder or hub id of a base model; a GGUF file is converted once, PipelineError if it cannot."""
    if not base.endswith(".gguf"):
        return base
    file = Path(base)
    if not file.is_file():
        raise PipelineError(f"{base}: no such file")
    status = file.stat()
    return _convert(file.resolve(), status.st_size, status.st_mtime_ns)


@cache
def _convert(file: Path, size: int, changed: int) -> str:
    """Convert a GGUF file to a folder in the hub's cache, again only if its size or its time of change differs."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME) / "gguf" / lineage.digest(file)
    if folder.is_dir():
        return str(folder)
    with durable.new_folder(folder) as partial:
        command = [sys.executable, "-P", "-m", "components.policy.gguf", str(file), str(partial)]
        converter = subprocess.run(command, capture_output=True, text=True, check=False)
        if converter.returncode:
            reason = (converter.stderr.strip().splitlines() or ["no reason"])[-1]
            raise PipelineError(f"{file}: cannot be read as a model ({reason})")
        durable.sync_tree(partial)
    return str(folder)


def model_file(base: str, name: str) -> Path:
    """Return a file of a model in a folder or on the hub; PipelineError if it is missing."""
    base = local_model(base)
    if Path(base).is_dir():
        if not (Path(base) / name).is_file():
            raise _NoFileError(f"model {base}: holds no {name}; a Hugging Face model folder is expected")
        return Path(base) / name
    # Slow to import, and not needed for a model in a folder.
    from huggingface_hub import hf_hub_download

    with _explain_hub_errors(base):
        return Path(hf_hub_download(base, name))


def optional_model_file(base: str, name: str) -> Path | None:
    """Return a file of a model in a folder or on the hub; None if the model lacks it."""
    try:
        return model_file(base, name)
    except _NoFileError:
        return None


class _NoFileError(PipelineError):
    """A model lacks a file."""


@contextmanager
def _explain_hub_errors(base: str) -> Iterator[None]:
    """Turn any error in the block, which fetches from the hub, into PipelineError; _NoFileError for a missing file."""
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces each of its retries
    try:
        yield
    except Exception as error:  # the hub client raises many kinds of errors, all meaning "not available"
        kind = _NoFileError if isinstance(error, EntryNotFoundError) else PipelineError
        if base.startswith("~"):
            raise kind(f"{base}: no such folder (~ is not expanded)") from None
        if base.startswith(("/", "./", "../")) or base.count("/") > 1:  # not the name of a model on the hub
            raise kind(f"{base}: no such folder") from None
        if isinstance(error, LocalEntryNotFoundError) and not constants.HF_HUB_OFFLINE:
            raise kind(f"{base}: no such folder, and the hub cannot be reached") from None
        remedy = "a gated model needs HF_TOKEN"
        if constants.HF_HUB_OFFLINE:
            remedy = "HF_HUB_OFFLINE is set, so only models in a folder or in the hub's cache can be used"
        reason = f"neither a folder nor a model that can be fetched ({type(error).__name__})"
        raise kind(f"{base}: {reason}; {remedy}") from None


def _pipeline_values(folder: Path) -> dict[str, Any]:
    """Return the content of PIPELINE_FILE; empty if the folder has none."""
    path = folder / PIPELINE_FILE
    values: dict[str, Any] = jsonl.read_json(path) if path.is_file() else {}
    return values


def holds_model(folder: Path) -> bool:
    """Return whether a folder has a model that a stage made, not a reference to one."""
    return (folder / PIPELINE_FILE).is_file() and "weights" not in _pipeline_values(folder)


def weights_folder(folder: Path) -> Path:
    """Return the folder with the weights of a stage's model; follow a reference, and fetch weights from the hub."""
    values = _pipeline_values(folder)
    if "weights" not in values:
        return folder
    weights = values["weights"]
    return Path(weights) if Path(weights).is_dir() else fetch_weights(weights, values.get("revision"))


def has_tools(folder: Path) -> bool:
    """Return whether the model in a stage's folder answers with tools, in an environment."""
    return _pipeline_values(folder).get("tools") is not None


def fetch_weights(base: str, revision: str | None = None) -> Path:
    """Fetch a model into the hub's cache and return its folder; PipelineError if that fails."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin"]
    with _explain_hub_errors(base):
        return Path(snapshot_download(base, revision=revision, allow_patterns=patterns))


def write_reference(folder: Path, model: Path) -> None:
    """Fill a folder with a reference to a model that a stage made, and with the model's lineage."""
    reference = {"weights": str(model.resolve()), "digest": lineage.digest(model)}
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write_json(folder / PIPELINE_FILE, {**jsonl.read_json(model / PIPELINE_FILE), **reference})
    shutil.copy(model / lineage.FILE_NAME, folder / lineage.FILE_NAME)


def base_materials(base: str, folder: Path) -> dict[str, Material]:
    """Return the origin of a base model from the `folder` that refers to it; empty for a model from scratch."""
    values = _pipeline_values(folder)
    if "digest" in values:
        return {base: Material(sha256=values["digest"])}
    if "revision" in values:
        return {base: Material(repository=base, commit=values["revision"])}
    return {}


def resolve_reference(folder: Path) -> Path:
    """Return the model that `folder` refers to, if a stage made it and it has the same prompt; otherwise `folder`."""
    reference = _pipeline_values(folder)
    if "digest" not in reference:
        return folder
    model = Path(reference["weights"])
    if not model.is_dir():
        where = f"{folder / PIPELINE_FILE}: the model is in {model}"
        raise PipelineError(f"{where}, which is not there; is its volume mounted, and was its run not removed?")
    is_made_by_stage = holds_model(model) and (model / lineage.FILE_NAME).is_file()
    has_same_prompt = prompt_settings(_pipeline_values(model)) == prompt_settings(reference)
    return model if is_made_by_stage and has_same_prompt else folder


def require_unchanged(folder: Path, digest: str) -> None:
    """Raise PipelineError if `folder` refers to a model whose present `digest` is not the one in the reference.

    Also update the model's modification time, so that the collector does not remove it while a stage reads it.
    """
    reference, model = _pipeline_values(folder), resolve_reference(folder)
    if model == folder:
        return
    with suppress(OSError):  # the folder may be another user's
        os.utime(model)
    if reference["digest"] != digest:
        raise PipelineError(
            f"model {reference['weights']}: has changed since it was passed on: its digest is {digest}, where "
            f"{reference['digest']} is expected; run the stage that made it again"
        )
