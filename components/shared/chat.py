"""How a question is put to a model: as plain text, or as a conversation by the chat template of its tokenizer.

Every prompt is made here, whether to fine-tune, to sample, to evaluate or to count tokens.
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
"""Of older models."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ANY_QUESTION, _ANY_ANSWER = "Is it so?", "It is so."
CUT = "..."
"""After the beginning of an observation that was too long."""
_DEFAULT = "default"
"""Name of the template that is used, where a tokenizer has several."""

Message = dict[str, str]


class AnsweredTurn(NamedTuple):
    """What a model wrote, and what its environment answered."""

    response: str
    observation: str
    ended: bool = True
    """Whether the turn ended with an end token; otherwise the message goes on after a block of output."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer."""

    model: str
    """Whose template it is, for messages."""
    text: str
    """In Jinja."""
    special_tokens: Mapping[str, str]
    """What `bos_token` and its like stand for."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        is_prompt: bool,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return a conversation as text; a prompt goes on to where the assistant speaks.

        The tools, as JSON schemas, are shown to the model where the template knows them.

        PipelineError where the template refuses the conversation, or is none.
        """
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it misses torch, which no template needs
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            rendered: list[str]
            rendered, _ = render_jinja_template(
                [list(messages)],
                tools=list(tools) or None,
                chat_template=self.text,
                add_generation_prompt=is_prompt,
                **{**self.special_tokens, **options},
            )
            return rendered[0]
        # It is code of somebody else.
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError, MemoryError) as error:
            reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
            raise PipelineError(f"model {self.model}: its chat template cannot be used ({reason})") from None


def read_template(base: str) -> ChatTemplate | None:
    """Return the chat template of a model in a folder or on the hub; None where it has none."""
    tokens, config = (_values(base, name) for name in (_SPECIAL_TOKENS, _TOKENIZER_CONFIG))
    path = optional_model_file(base, _TEMPLATE_FILE)
    text = path.read_text(encoding="utf-8") if path else config.get("chat_template")
    if isinstance(text, list):
        text = {each["name"]: each["template"] for each in text}.get(_DEFAULT)
    named = {name: value for name in _TOKENS if (value := {**tokens, **config}.get(name)) is not None}
    contents = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return ChatTemplate(base, text, contents) if text else None


def _values(base: str, name: str) -> dict[str, Any]:
    path = optional_model_file(base, name)
    values: dict[str, Any] = jsonl.read_json(path) if path else {}
    return values


@dataclass(frozen=True)
class PromptFormat:
    """How questions are put to a model, and how its answers end."""

    config: ModelConfig
    template: ChatTemplate | None
    """None where the text of the prompt alone is put to it."""

    def prompt(
        self,
        question: str,
        source: str = "",
        earlier: Sequence[tuple[str, str]] = (),
        turns: Sequence[AnsweredTurn] = (),
    ) -> str:
        """Return the text of the prompt that asks a question from a source of problems, after earlier messages.

        With `turns`, it is the prompt of the turn after them. PipelineError where there are earlier messages, and no
        template to write them with.
        """
        text = self.config.ask(question, source)
        if self.template is not None:
            return self._render([*self._messages(text, earlier), *self._history(turns)], is_prompt=True)
        if earlier:
            roles = ", ".join(role for role, _ in earlier)
            raise PipelineError(
                f"a question follows other messages ({roles}), which need a chat template: set train_sft.model.chat, "
                "such as `chat: {}`, or a protocol with chat"
            )
        return text

    def messages(self, question: str, source: str = "") -> list[Message]:
        """Return what asks a question in a conversation; nothing without a template."""
        return [] if self.template is None else self._messages(self.config.ask(question, source))

    def response(self, problem: Problem) -> str:
        """Return what comes after the prompt where a model gives the solution of a problem, without its end.

        It is the solution, with what a template that shows answers puts around it (see `require_answers`).
        """
        if self.template is None:
            return problem.solution
        return self._turn(self._asked(problem), problem.solution)

    def response_parts(self, problem: Problem) -> list[tuple[str, bool]]:
        """Return the response to learn from as parts of text, each with whether an environment wrote it.

        A solution shows a call and its answer as fenced blocks, whatever the format of calls; what the environment
        wrote is there what the model reads (see `observation`). PipelineError where it calls what is no tool.
        """
        if self.call_format == "tool_call":
            return self._turns_with_calls(problem)
        response = self.response(problem)
        return split_outputs(response) if self.call_format == "fenced" else [(response, False)]

    def _turns_with_calls(self, problem: Problem) -> list[tuple[str, bool]]:
        assert self.config.tools is not None
        messages = self._asked(problem)
        parts = split_outputs(problem.solution)
        turns: list[tuple[str, bool]] = []
        for place, (text, is_output) in enumerate(parts, 1):
            if is_output:
                message = {"role": "tool", "content": output_text(text)}
                turns.append((self.observation(message["content"], ended=True), True))
            elif place == len(parts):
                turns.append((self._turn(messages, text), False))
                break
            else:
                try:
                    call = as_tool_call(text, self.config.tools.known_functions)
                except CallError as error:
                    raise PipelineError(f"problem {problem.id}: its solution {error}") from None
                message = {"role": "assistant", "content": call}
                turns.append((self._turn(messages, call) + self.end.strip(), False))
            messages.append(message)
        return turns

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model calls tools; None where it has no environment.

        PipelineError where calls are to be in JSON and the chat template shows no tools.
        """
        tools = self.config.tools
        if tools is None:
            return None
        knows_tools = self.template is not None and all(each in self.template.text for each in ("tools", "<tool_call>"))
        if tools.call_format == "tool_call" and not knows_tools:
            raise PipelineError(
                f"train_sft.model.tools.call_format: the chat template of {self.config.base} shows no tools with "
                "`<tool_call>`; accepted for it: fenced, message, null"
            )
        default: CallFormat = "tool_call" if knows_tools else "fenced"
        return tools.call_format or ("message" if tools.environment == "feedback" else default)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The functions that the chat template shows to the model, as JSON schemas."""
        if self.config.tools is None or self.call_format != "tool_call":
            return []
        return [each.json_schema for each in self.config.tools.known_functions.values()]

    @property
    def tools(self) -> ToolsConfig | None:
        """The environment that the model acts in, with the format of its calls."""
        tools = self.config.tools
        return tools and tools.model_copy(update={"call_format": self.call_format})

    @property
    def turn_stops(self) -> tuple[str, ...]:
        """Texts that end a turn as an end token does, and belong to it: the end of a fenced block."""
        return (f"\n{FENCE}\n",) if self.call_format == "fenced" else ()

    def observation(self, text: str, *, ended: bool) -> str:
        """Return what the model reads after a turn, up to where it writes again: the answer of its environment.

        Where the turn ended with an end token, it is a message of the tool for each call or, without calls in JSON, a
        message of the user, as the chat template writes it after that token; otherwise a block of output in the same
        message.
        """
        replies = self.replies(text)
        if not ended and self.call_format == "fenced":
            return as_fenced_output(replies[0]["content"])
        if self.template is None:
            return "\n{content}\n".format_map(replies[0])
        answer = _ANY_ANSWER
        while answer in text:
            answer += answer
        messages = [*self._messages(_ANY_QUESTION), {"role": "assistant", "content": answer}, *replies]
        rendered = self._render(messages, is_prompt=True)
        after = rendered.rpartition(answer)[2]
        return after.removeprefix(self.end.strip()) if ended else after

    def replies(self, observation: str) -> list[Message]:
        """Return the messages with which an environment answers a turn: one for each call, where calls are in JSON."""
        is_call = self.call_format == "tool_call"
        texts = observation.split(NEXT_ANSWER) if is_call else [observation.replace(NEXT_ANSWER, "\n")]
        return [{"role": "tool" if is_call else "user", "content": each} for each in texts]

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template changes what a model wrote, such as its thought, once a reply follows it."""
        if self.template is None or self.config.tools is None:
            return False
        prompt, thought = self.prompt(_ANY_QUESTION), f"Is it?\n</think>\n\n{_ANY_ANSWER}"
        texts = [_ANY_ANSWER, f"<think>\n{thought}"]
        if opens_thought(prompt):
            prompt, texts = prompt.rpartition("<think>")[0], [f"<think>\n{thought}"]
        return not all(
            self.prompt(_ANY_QUESTION, turns=[AnsweredTurn(text, "No.")]).startswith(prompt + text + self.end.strip())
            for text in texts
        )

    def _history(self, turns: Sequence[AnsweredTurn]) -> Iterator[Message]:
        content = ""
        for turn in turns:
            content += turn.response
            if turn.ended:
                yield {"role": "assistant", "content": content}
                yield from self.replies(turn.observation)
                content = ""
            else:
                content += as_fenced_output(turn.observation)

    def require_observations(self, num_tokens: Callable[[str], int]) -> None:
        """Raise PipelineError where `max_observation_tokens` leaves no room for a character of a long observation.

        `num_tokens` counts the tokens of a text.
        """
        tools = self.config.tools
        if tools is None:
            return
        ends = (False, True) if self.call_format == "fenced" else (True,)
        least = max(num_tokens(self.observation(f"0{CUT}", ended=ended)) for ended in ends)
        if tools.max_observation_tokens < least:
            raise PipelineError(
                f"train_sft.model.tools.max_observation_tokens: is {tools.max_observation_tokens}, and what stands "
                f"around an answer of the environment, with one character of it, takes {least} tokens; set it to "
                f"{least} or more"
            )

    def require_answers(self) -> None:
        """Raise PipelineError where a template writes answers that do not begin as a prompt does.

        A model that learned from them would learn something else than to answer prompts.
        """
        messages = self._messages(_ANY_QUESTION)
        if self.template and not self._answered(messages, _ANY_ANSWER).startswith(
            self._render(messages, is_prompt=True)
        ):
            raise PipelineError(
                f"model {self.template.model}: its chat template shows no answer to learn from: the turn of an "
                "assistant does not begin as its prompt does, as where thoughts are left out; set "
                "train_sft.num_steps: 0, or train_sft.model.thinking if the template knows enable_thinking"
            )

    @cached_property
    def end(self) -> str:
        """The text with which a template ends the turn of an assistant; empty without a template."""
        if self.template is None:
            return ""
        return self._answered(self._messages(_ANY_QUESTION), _ANY_ANSWER).rpartition(_ANY_ANSWER)[2]

    def _turn(self, messages: Sequence[Message], text: str) -> str:
        """What a template writes from its prompt on where the assistant says `text`, without the end of the turn."""
        prompt, whole = self._render(messages, is_prompt=True), self._answered(messages, text)
        return whole.removeprefix(prompt).removesuffix(self.end) if whole.startswith(prompt) else text

    def _asked(self, problem: Problem) -> list[Message]:
        return self._messages(self.config.ask(problem.question, problem.source), problem.earlier)

    def _messages(self, text: str, earlier: Sequence[tuple[str, str]] = ()) -> list[Message]:
        """Return the messages up to the question; a problem's own system message replaces the config's."""
        system = self.config.chat.system if self.config.chat else None
        if system is not None and not any(role == "system" for role, _ in earlier):
            earlier = [("system", system), *earlier]
        return [{"role": role, "content": content} for role, content in (*earlier, ("user", text.strip()))]

    def _answered(self, messages: Sequence[Message], answer: str) -> str:
        return self._render([*messages, {"role": "assistant", "content": answer}], is_prompt=False)

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        assert self.template is not None
        thinking = self.config.thinking
        return self.template.render(messages, is_prompt=is_prompt, thinking=thinking, tools=self.schemas)


def prompt_format(config: ModelConfig) -> PromptFormat:
    """Return how questions are put to a model, as its files say; PipelineError where a template is missing."""
    if config.chat is None:
        return PromptFormat(config, None)
    template = read_template(config.base)
    if template is None:
        raise no_template(config.base)
    return PromptFormat(config, template)


def opens_thought(prompt: str) -> bool:
    """Tell whether a prompt ends in `<think>`, so that what follows begins inside a thought."""
    return prompt.rstrip().endswith("<think>")


def no_template(base: str) -> PipelineError:
    """Return the error of a model without a chat template where one is needed."""
    return PipelineError(
        f"model {base}: has no chat template ({_TEMPLATE_FILE}, or `chat_template` in {_TOKENIZER_CONFIG}); "
        "leave out train_sft.model.chat, or name a model that was trained on conversations"
    )
