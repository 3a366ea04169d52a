"""How a question is put to a model: as plain text, or as a conversation by the chat template of its tokenizer.

Every prompt is made here, whether to fine-tune, to sample, to evaluate or to count tokens. The last runs without
transformers, so a template is rendered here, as transformers renders it (`utils/chat_template_utils.py`, 5.19).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.model import ModelConfig, optional_model_file
from components.shared.problem import Problem

_TEMPLATE_FILE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
"""Of older models."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ANY_QUESTION, _ANY_ANSWER = "Is it so?", "It is so."
_DEFAULT = "default"
"""Name of the template that is used, where a tokenizer has several."""

Message = dict[str, str]


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer."""

    model: str
    """Whose template it is, for messages."""
    text: str
    """In Jinja."""
    special_tokens: Mapping[str, str]
    """What `bos_token` and its like stand for."""

    def render(self, messages: Sequence[Message], *, is_prompt: bool, thinking: bool | None = None) -> str:
        """Return a conversation as text; a prompt goes on to where the assistant speaks.

        PipelineError where the template refuses the conversation, or is none.
        """
        options = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return _compiled(self.text).render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=is_prompt,
                **{**self.special_tokens, **options},
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:  # it is code of somebody else
            reason = str(error).strip().split("\n", 1)[0]
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

    def prompt(self, question: str, source: str = "") -> str:
        """Return the text of the prompt that asks a question from a source of problems."""
        text = self.config.ask(question, source)
        return text if self.template is None else self._render(self._messages(text), is_prompt=True)

    def messages(self, question: str, source: str = "") -> list[Message]:
        """Return what asks a question in a conversation; nothing without a template."""
        return [] if self.template is None else self._messages(self.config.ask(question, source))

    def response(self, problem: Problem) -> str:
        """Return what comes after the prompt where a model gives the solution of a problem, without its end.

        It is the solution, with what a template that shows answers puts around it (see `require_answers`).
        """
        if self.template is None:
            return problem.solution
        messages = self._messages(self.config.ask(problem.question, problem.source))
        prompt, whole = self._render(messages, is_prompt=True), self._answered(messages, problem.solution)
        return whole.removeprefix(prompt).removesuffix(self.end) if whole.startswith(prompt) else problem.solution

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

    def _messages(self, text: str) -> list[Message]:
        system = self.config.chat.system if self.config.chat else None
        before = [] if system is None else [{"role": "system", "content": system}]
        return [*before, {"role": "user", "content": text.strip()}]

    def _answered(self, messages: Sequence[Message], answer: str) -> str:
        return self._render([*messages, {"role": "assistant", "content": answer}], is_prompt=False)

    def _render(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        assert self.template is not None
        return self.template.render(messages, is_prompt=is_prompt, thinking=self.config.thinking)


def prompt_format(config: ModelConfig) -> PromptFormat:
    """Return how questions are put to a model, as its files say; PipelineError where a template is missing."""
    if config.chat is None:
        return PromptFormat(config, None)
    template = read_template(config.base)
    if template is None:
        raise no_template(config.base)
    return PromptFormat(config, template)


def no_template(base: str) -> PipelineError:
    """Return the error of a model without a chat template where one is needed."""
    return PipelineError(
        f"model {base}: has no chat template ({_TEMPLATE_FILE}, or `chat_template` in {_TOKENIZER_CONFIG}); "
        "leave out train_sft.model.chat, or name a model that was trained on conversations"
    )


class _Generation(Extension):
    """Renders what is between `{% generation %}` and `{% endgeneration %}`, which transformers can mark as tokens."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


@cache
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(text)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
