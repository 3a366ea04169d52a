"""Whether a model can use its tools, as its files show: its chat template, its tokenizer, the room for observations."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from components.shared.chat import PromptFormat, prompt_format
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.tokenizer import tokenizer_for
from components.shared.tools import FUNCTIONS

_T = TypeVar("_T")


def wrong_tools(model: ModelConfig, key: str, coding: Sequence[str]) -> Iterator[str]:
    """Yield a line for each thing that is wrong with a model's tools, by their `key` in the params.

    A base model whose files cannot be read is reported elsewhere, and what they would show is left out. `coding` are
    the sources whose problems are answered with code.
    """
    tools = model.tools
    if tools is None:
        return
    form, call_format = _read(prompt_format, model), tools.call_format
    try:
        if form is not None:
            call_format = form.call_format
            form.prompt("1 + 1?")
            form.observation("2", ended=True)
            _require_observations(form)
    except PipelineError as error:
        line = str(error).replace("train_sft.model.tools", key)
        yield line if line.startswith(key) else f"{key}: {line}"
    if tools.functions and call_format not in (None, "tool_call"):
        yield (
            f"{key}.functions: are shown to a model that calls tools with tool_call, and the format is {call_format}; "
            f"leave them out, or set {key}.call_format: tool_call"
        )
    for source in coding if call_format == "fenced" and tools.environment in FUNCTIONS else ():
        yield (
            f"{key}.call_format: is fenced, so that the code that answers a problem from {source} would call "
            f"{tools.environment}; set it to tool_call, for a model whose chat template shows tools"
        )


def _require_observations(form: PromptFormat) -> None:
    """Raise PipelineError where observations have no room, as far as the tokenizer is known."""
    model = form.config
    if model.scratch and model.scratch.vocabulary_size:  # it learns its vocabulary from the problems
        return
    tokenizer = _read(lambda model: tokenizer_for(model, []), model)
    if tokenizer is not None:
        form.require_observations(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))


def _read(read: Callable[[ModelConfig], _T], model: ModelConfig) -> _T | None:
    """What is read from the files of a base model; None where they cannot be read."""
    try:
        return read(model)
    except PipelineError:
        return None
