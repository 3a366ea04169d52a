"""Whether a model can use its tools, as far as its chat template and its tokenizer show."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from components.shared.chat import PromptFormat, prompt_format
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig
from components.shared.tokenizer import tokenizer_for
from components.shared.tools import FUNCTIONS


def wrong_tools(model: ModelConfig, key: str, coding: Sequence[str]) -> Iterator[str]:
    """Yield a line for each problem with a model's tools, which are set under `key` in the params.

    If the files of the base model cannot be read, which is reported elsewhere, checks that need them are left out.
    `coding` are the sources whose problems are answered with code.
    """
    tools = model.tools
    if tools is None:
        return
    call_format = tools.call_format
    with suppress(PipelineError):
        form = prompt_format(model)
        try:
            call_format = form.call_format
            form.prompt("1 + 1?")
            form.observation("2", ended=True)
            _require_room_for_observations(form)
        except PipelineError as error:
            line = str(error).replace("train_sft.model.tools", key)
            yield line if line.startswith(key) else f"{key}: {line}"
    if tools.functions and call_format not in (None, "tool_call"):
        yield (
            f"{key}.functions: are shown to a model that calls tools with tool_call, and the format is {call_format}; "
            f"leave them out, or set {key}.call_format: tool_call"
        )
    if call_format == "fenced" and tools.environment in FUNCTIONS:
        for source in coding:
            yield (
                f"{key}.call_format: is fenced, so that the code that answers a problem from {source} would call "
                f"{tools.environment}; set it to tool_call, for a model whose chat template shows tools"
            )


def _require_room_for_observations(form: PromptFormat) -> None:
    """Raise PipelineError if observations have no room; do nothing if the tokenizer is not known yet."""
    model = form.config
    if model.scratch and model.scratch.vocabulary_size:  # the tokenizer learns its vocabulary from the problems
        return
    try:
        tokenizer = tokenizer_for(model, [])
    except PipelineError:
        return
    form.require_room_for_observations(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))
