"""Prompts: plain text, or conversations in the chat template of the model's tokenizer.

All prompts are made here: for fine-tuning, sampling, evaluation and counting tokens.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig, optional_model_file
from components.shared.problem import Problem
from components.shared.tools import (
    FENCE,
    NEXT_ANSWER,
    CallError,
    CallFormat,
    ToolsConfig,
    as_fenced_output,
    as_tool_call,
    output_text,
    split_outputs,
)

_TEMPLATE_FILE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
"""File of older models."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ANY_QUESTION, _ANY_ANSWER = "Is it so?", "It is so."
"""Messages with which a template is rendered to find the text around them."""
CUT = "..."
"""End of a truncated observation."""

Message = dict[str, str]


class AnsweredTurn(NamedTuple):
    """A turn of a model, and the answer of its environment."""

    response: str
    observation: str
    ended: bool = True
    """Whether the turn ended with an end token; otherwise its message continues after a fenced block of output."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer."""

    model: str
    """Id or folder of the model, for error messages."""
    text: str
    """The template in Jinja."""
    special_tokens: Mapping[str, str]
    """Texts of `bos_token` and the other special tokens."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        is_prompt: bool,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return a conversation as text; a prompt includes the beginning of the assistant's turn.

        PipelineError if the template is invalid or refuses the conversation. It may ignore the JSON schemas of `tools`.
        """
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # about missing torch, which no template needs
        from transformers.utils.chat_template_utils import render_jinja_template

        values: dict[str, Any] = {**self.special_tokens, "tools": list(tools) or None}
        if thinking is not None:
            values["enable_thinking"] = thinking
        try:
            rendered, _ = render_jinja_template(
                [list(messages)], chat_template=self.text, add_generation_prompt=is_prompt, **values
            )
            return str(rendered[0])
        # Templates of others can fail in any of these ways.
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError, MemoryError) as error:
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise PipelineError(f"model {self.model}: its chat template cannot be used ({reason})") from None


def read_template(base: str) -> ChatTemplate | None:
    """Return the chat template of a model in a folder or on the hub; None if it has none."""
    settings: dict[str, Any] = {}
    for name in (_SPECIAL_TOKENS, _TOKENIZER_CONFIG):
        file = optional_model_file(base, name)
        if file:
            settings |= jsonl.read_json(file)
    template_file = optional_model_file(base, _TEMPLATE_FILE)
    text = template_file.read_text(encoding="utf-8") if template_file else settings.get("chat_template")
    if isinstance(text, list):  # several templates with names
        text = {each["name"]: each["template"] for each in text}.get("default")
    if not text:
        return None
    tokens = {name: settings[name] for name in _TOKENS if settings.get(name) is not None}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(base, text, texts)


@dataclass(frozen=True)
class PromptFormat:
    """How the prompts, turns and observations of a model are written as text."""

    config: ModelConfig
    template: ChatTemplate | None
    """None for plain-text prompts."""

    def prompt(
        self,
        question: str,
        source: str = "",
        earlier: Sequence[tuple[str, str]] = (),
        turns: Sequence[AnsweredTurn] = (),
    ) -> str:
        """Return the prompt for the first turn of an answer or, with a chat template, for the turn after `turns`.

        `earlier` messages (role, content) precede the question; PipelineError if there are any, but no chat template.
        """
        if self.template is not None:
            messages = [*self._messages(question, source, earlier), *self._history(turns)]
            return self._render(messages, is_prompt=True)
        if earlier:
            roles = ", ".join(role for role, _ in earlier)
            raise PipelineError(
                f"a question from {source} follows other messages ({roles}), which need a chat template: set "
                "train_sft.model.chat, such as `chat: {}`, for a train_sft.model.base that has one (models made from "
                "scratch have none)"
            )
        return self.config.ask(question, source)

    def messages(self, question: str) -> list[Message]:
        """Return the messages that ask a question; empty without a template."""
        return [] if self.template is None else self._messages(question)

    def response_parts(self, problem: Problem) -> list[tuple[str, bool]]:
        """Return the response to learn from, without the end of its last turn, as pairs (text, is_observation).

        A solution has calls and their answers as fenced blocks, regardless of the call format; the answers become
        observations (see `observation`). PipelineError if it calls an unknown tool.
        """
        if self.call_format == "tool_call":
            return self._turns_with_calls(problem)
        response = problem.solution_for(self.config.answer)
        if self.template is not None:
            messages = self._messages(problem.question, problem.source, problem.earlier)
            response = self._turn(messages, response)
        return split_outputs(response) if self.call_format == "fenced" else [(response, False)]

    def _turns_with_calls(self, problem: Problem) -> list[tuple[str, bool]]:
        """Return the parts of a response as in `response_parts`, with the fenced calls of the solution in JSON."""
        assert self.config.tools is not None
        messages = self._messages(problem.question, problem.source, problem.earlier)
        parts = split_outputs(problem.solution_for(self.config.answer))
        turns: list[tuple[str, bool]] = []
        for number, (text, is_output) in enumerate(parts, start=1):
            if is_output:
                output = output_text(text)
                turns.append((self.observation(output, ended=True), True))
                messages.append({"role": "tool", "content": output})
            elif number == len(parts):  # text after the last output: it calls nothing
                turns.append((self._turn(messages, text), False))
            else:
                try:
                    turn = as_tool_call(text, self.config.tools.known_functions)
                except CallError as error:
                    raise PipelineError(f"problem {problem.id}: its solution {error}") from None
                turns.append((self._turn(messages, turn) + self.end.strip(), False))
                messages.append({"role": "assistant", "content": turn})
        return turns

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The call format of the model; None without an environment.

        PipelineError if the config requires `tool_call` and the chat template shows no tools with `<tool_call>`.
        """
        tools = self.config.tools
        if tools is None:
            return None
        template = self.template.text if self.template else ""
        knows_tools = "tools" in template and "<tool_call>" in template
        if tools.call_format == "tool_call" and not knows_tools:
            raise PipelineError(
                f"train_sft.model.tools.call_format: the chat template of {self.config.base} shows no tools with "
                "`<tool_call>`; accepted for it: fenced, message, null"
            )
        if tools.call_format is not None:
            return tools.call_format
        if tools.environment == "feedback":
            return "message"
        return "tool_call" if knows_tools else "fenced"

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The functions that the chat template shows to the model, as JSON schemas."""
        tools = self.tools
        if tools is None or tools.call_format != "tool_call":
            return []
        return [each.json_schema for each in tools.known_functions.values()]

    @property
    def tools(self) -> ToolsConfig | None:
        """The environment of the model, with the call format filled in; None without an environment."""
        tools = self.config.tools
        return tools.model_copy(update={"call_format": self.call_format}) if tools else None

    @property
    def turn_stops(self) -> tuple[str, ...]:
        """Texts that end a turn, as an end token does, and are part of it: the end of a fenced block."""
        return (f"\n{FENCE}\n",) if self.call_format == "fenced" else ()

    def observation(self, text: str, *, ended: bool) -> str:
        """Return the text between a turn and the model's next turn, given the answer of the environment.

        After an end token (`ended`), it is a tool message for each call or, without calls in JSON, a user message, as
        the chat template writes it after that token; otherwise a fenced block of output in the same message.
        """
        replies = self.replies(text)
        first_reply = replies[0]["content"]  # the only one, except for calls in JSON, which need a template
        if not ended and self.call_format == "fenced":
            return as_fenced_output(first_reply)
        if self.template is None:
            return f"\n{first_reply}\n"
        answer = _ANY_ANSWER
        while answer in text:  # its last occurrence must be the model's turn
            answer += answer
        messages = [*self._messages(_ANY_QUESTION), {"role": "assistant", "content": answer}, *replies]
        rendered = self._render(messages, is_prompt=True)
        after = rendered.rpartition(answer)[2]
        return after.removeprefix(self.end.strip()) if ended else after

    def replies(self, observation: str) -> list[Message]:
        """Return the messages with which an environment answers a turn: one for each call if calls are in JSON."""
        if self.call_format == "tool_call":
            return [{"role": "tool", "content": each} for each in observation.split(NEXT_ANSWER)]
        return [{"role": "user", "content": observation.replace(NEXT_ANSWER, "\n")}]

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template drops the thought, and nothing else, from a turn of the model once a reply follows.

        False for templates that read thoughts from other fields of a message, or mark them by special tokens.
        """
        if self.template is None or self.config.tools is None:
            return False
        prompt = self.prompt(_ANY_QUESTION)
        if opens_thought(prompt):  # in the history, this `<think>` would be a part of the turn
            prompt = prompt.rpartition("<think>")[0]

        def is_kept(turn: str) -> bool:
            return self.prompt(_ANY_QUESTION, turns=[AnsweredTurn(turn, "No.")]).startswith(prompt + turn)

        return is_kept(_ANY_ANSWER) and not is_kept(f"<think>\nIs it?\n</think>\n\n{_ANY_ANSWER}")

    def _history(self, turns: Sequence[AnsweredTurn]) -> Iterator[Message]:
        """Yield the messages of turns and replies; turns without an end token are parts of one message."""
        content = ""
        for turn in turns:
            content += turn.response
            if turn.ended:
                yield {"role": "assistant", "content": content}
                yield from self.replies(turn.observation)
                content = ""
            else:
                content += as_fenced_output(turn.observation)

    def require_room_for_observations(self, num_tokens: Callable[[str], int]) -> None:
        """Raise PipelineError if `max_observation_tokens` (as `num_tokens` counts) has no room for one character."""
        tools = self.config.tools
        if tools is None:
            return
        possible_ends = (False, True) if self.call_format == "fenced" else (True,)
        least = max(num_tokens(self.observation(f"0{CUT}", ended=ended)) for ended in possible_ends)
        if tools.max_observation_tokens < least:
            raise PipelineError(
                f"train_sft.model.tools.max_observation_tokens: is {tools.max_observation_tokens}, and one character "
                f"of an environment's answer, with the text around it, takes {least} tokens; set it to {least} or more"
            )

    def require_answers(self) -> None:
        """Raise PipelineError if the template's text of an answered question does not begin with the prompt."""
        if self.template is None:
            return
        messages = self._messages(_ANY_QUESTION)
        if not self._render_answered(messages, _ANY_ANSWER).startswith(self._render(messages, is_prompt=True)):
            raise PipelineError(
                f"model {self.template.model}: its chat template shows no answer to learn from: the text of an "
                "answered question does not begin with the prompt, for example because thoughts are left out; set "
                "train_sft.num_steps: 0, or train_sft.model.thinking if the template knows enable_thinking"
            )

    @cached_property
    def end(self) -> str:
        """The text with which the template ends an assistant's turn; empty without a template."""
        if self.template is None:
            return ""
        return self._render_answered(self._messages(_ANY_QUESTION), _ANY_ANSWER).rpartition(_ANY_ANSWER)[2]

    def _turn(self, messages: Sequence[Message], text: str) -> str:
        """Return the template's text of a turn without prompt and end: `text`, perhaps after an empty thought."""
        prompt, answered = self._render(messages, is_prompt=True), self._render_answered(messages, text)
        if not answered.startswith(prompt):
            return text
        return answered.removeprefix(prompt).removesuffix(self.end)

    def _messages(self, question: str, source: str = "", earlier: Sequence[tuple[str, str]] = ()) -> list[Message]:
        """Return the messages up to a question; a system message in `earlier` replaces the config's."""
        system = self.config.chat.system if self.config.chat else None
        if system is not None and not any(role == "system" for role, _ in earlier):
            earlier = [("system", system), *earlier]
        prompt = self.config.ask(question, source).strip()
        return [{"role": role, "content": content} for role, content in (*earlier, ("user", prompt))]

    def _render_answered(self, messages: Sequence[Message], answer: str) -> str:
        return self._render([*messages, {"role": "assistant", "content": answer}], is_prompt=False)

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        assert self.template is not None
        thinking = self.config.thinking
        return self.template.render(messages, is_prompt=is_prompt, thinking=thinking, tools=self.schemas)


def prompt_format(config: ModelConfig) -> PromptFormat:
    """Return the prompt format of a model; PipelineError if the chat template that it needs is missing."""
    if config.chat is None:
        return PromptFormat(config, None)
    template = read_template(config.base)
    if template is None:
        raise no_template(config.base)
    return PromptFormat(config, template)


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends in `<think>`, so that the response begins inside a thought."""
    return prompt.rstrip().endswith("<think>")


def no_template(base: str) -> PipelineError:
    """Return the error for a model without the chat template that it needs."""
    return PipelineError(
        f"model {base}: has no chat template ({_TEMPLATE_FILE}, or `chat_template` in {_TOKENIZER_CONFIG}); "
        "leave out train_sft.model.chat, or name a model that was trained on conversations"
    )
