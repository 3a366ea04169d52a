"""Tools that a model may use while it answers: the config of its environment, and the syntax of calls."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from components.shared.answer_policy import AnswerPolicy
from components.shared.config import Config, Operational
from components.shared.custom_code import custom_code_materials, is_custom
from components.shared.lineage import Material, file_digest

CallFormat = Literal["fenced", "tool_call", "message"]

FENCE = "```"
NEXT_ANSWER = "\x1e"
"""ASCII's record separator, between the answers to several calls in an observation."""
OUTPUT = "output"
"""Label of the fenced block with which an environment answers a fenced call."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_ACCEPTED = f'Write {{"name": NAME, "arguments": {{...}}}} between {_OPEN} and {_CLOSE}.'
_LABEL_IS_MISSING = "A block that calls a tool begins with three backticks and the name of the tool."
_OUTPUT = re.compile(rf"(?<=\n{FENCE}\n)({FENCE}`*){OUTPUT}\n(?:.*?\n)??\1(?:\n|\Z)", re.DOTALL)
_FENCES = re.compile(rf"^{FENCE}`*", re.MULTILINE)
_MAX_SHOWN_CHARACTERS = 200
_MAX_EXACT = 2**53
"""Largest float below which floats represent every whole number exactly."""


class CalculatorArguments(Config):
    """Arguments of `calculator`."""

    max_calls: int | None = Field(None, gt=0)
    """Calls that are answered; null for all that `max_turns` allows."""
    decimals: int = Field(10, ge=0, le=50)
    """Decimals to which a result is rounded."""


class PythonArguments(Config):
    """Arguments of `python`."""

    max_calls: int | None = Field(None, gt=0)
    """Calls that are answered; null for all that `max_turns` allows."""
    max_output_characters: int = Field(2000, gt=0)
    """Characters of a block's output; the middle of a longer output is left out."""


class SearchArguments(Config):
    """Arguments of `search`."""

    file: str = Field(min_length=1)
    """Documents to search: JSON lines with the texts `title` and `text`."""
    num_results: int = Field(3, gt=0)
    """Documents in an answer."""
    max_text_characters: int = Field(600, gt=0)
    """Characters of each document in an answer."""
    max_calls: int | None = Field(None, gt=0)
    """Calls that are answered; null for all that `max_turns` allows."""


class FeedbackArguments(Config):
    """Arguments of `feedback`."""

    num_tries: int = Field(2, gt=0)
    """Answers that a model may give, the first included; at most `max_turns`."""
    discount: float = Field(0.5, ge=0, le=1)
    """Factor by which the reward for a right answer falls with each try."""
    message: str = Field("That is not right. Try again.", min_length=1)
    """What a model reads after a wrong answer."""
    answer: AnswerPolicy = AnswerPolicy.DECLARED
    """Where a response has to state its final answer; the same as `train_sft.model.answer`."""


ARGUMENTS: Mapping[str, type[Config]] = {
    "calculator": CalculatorArguments,
    "python": PythonArguments,
    "search": SearchArguments,
    "feedback": FeedbackArguments,
}
"""The built-in environments, with the models of their arguments."""


class FunctionArgument(Config):
    """An argument of a function that a model may call."""

    type: Literal["string", "integer", "number", "boolean", "array", "object"] = "string"
    """Its type in JSON."""
    description: str = ""
    """What it means, for the model."""
    required: bool = True
    """Whether a call has to give it."""


class Function(Config):
    """A function that a model may call."""

    name: str = Field(pattern=r"^\w+$")
    """Its name in calls."""
    description: str = ""
    """What it does, for the model."""
    arguments: dict[str, FunctionArgument] = Field(default_factory=dict)
    """Its arguments, by name."""

    @property
    def json_schema(self) -> dict[str, Any]:
        """The function as a JSON schema in OpenAI's form, which chat templates take."""
        properties: dict[str, dict[str, str]] = {}
        for name, each in self.arguments.items():
            properties[name] = {"type": each.type}
            if each.description:
                properties[name]["description"] = each.description
        required = [name for name, each in self.arguments.items() if each.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_CALCULATE = "Computes an arithmetic expression exactly."
_RUN_CODE = "Runs Python code and returns what it prints. Later calls see the names of earlier ones."
FUNCTIONS: Mapping[str, Function] = {
    name: Function(name=name, description=purpose, arguments={argument: FunctionArgument(description=meaning)})
    for name, purpose, argument, meaning in (
        ("calculator", _CALCULATE, "expression", "Numbers, + - * / // % ** and parentheses."),
        ("python", _RUN_CODE, "code", "Python code; the standard library can be imported."),
        ("search", "Searches documents.", "query", "Words to search for."),
    )
}
"""The functions of the built-in environments with tools."""


class ToolsConfig(Config):
    """The environment in which a model answers in several turns."""

    environment: str = Field(min_length=1)
    """`calculator`, `python`, `search`, `feedback`, or `package.module:Class` for a custom environment."""
    arguments: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    """Arguments of the environment, by name; null in a params file selects the default. A custom environment gets whole
    numbers as int, such as 2.0 as 2."""
    call_format: CallFormat | None = None
    """How a call is written. `fenced`: a fenced block of code, answered by a fenced block in the same message;
    `tool_call`: JSON between `<tool_call>` and `</tool_call>`, answered by a message of the tool (Hermes, Qwen);
    `message`: no calls, the environment answers every message as a user would. Null takes `message` for `feedback`,
    `tool_call` where the model's chat template knows it, else `fenced`."""
    functions: list[Function] = Field(default_factory=list)
    """Functions of a custom environment that the chat template shows to the model with `tool_call`; built-in
    environments show theirs."""
    max_turns: int = Field(4, ge=2)
    """Turns of the model after which a trajectory is truncated; at least 2, or it would never read an observation."""
    max_observation_tokens: int = Field(256, gt=0)
    """Tokens of one answer of the environment; longer ones are truncated."""
    timeout_s: Annotated[float, Operational] = Field(30.0, gt=0)
    """Time for one answer of the environment, after which the trajectory has failed."""
    memory_gib: Annotated[float, Operational] = Field(4.0, gt=0)
    """Address space of one process of environments. A step that exceeds it beside other trajectories is tried again
    alone before it fails."""
    num_workers: Annotated[int | None, Operational] = Field(None, gt=0)
    """Processes in which environments run, per training process; null for its share of the processor cores."""

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, environment: str) -> str:
        if environment not in ARGUMENTS and not is_custom(environment):
            raise ValueError(f"no such environment; accepted: {', '.join(ARGUMENTS)}, package.module:Class")
        return environment

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Validate the arguments of a built-in environment; for a custom one only make whole numbers ints."""
        accepted = ARGUMENTS.get(info.data.get("environment", ""))
        if accepted is None:
            return {name: _with_ints(value) for name, value in arguments.items()}
        names = list(accepted.model_fields)
        for name in arguments:
            if name not in names:  # a ValueError would not have the name of the argument in its location
                message = f"no such argument of {info.data['environment']}; accepted: {', '.join(names)}"
                error = PydanticCustomError("value_error", message)
                details = InitErrorDetails(type=error, loc=(name,), input={})
                raise ValidationError.from_exception_data("arguments", [details])
        # Kubeflow passes whole numbers as 3.0.
        return accepted.model_validate(arguments).model_dump(mode="json", exclude_unset=True)

    @model_validator(mode="after")
    def _check_call_format(self) -> "ToolsConfig":
        if self.functions and self.environment in ARGUMENTS:
            raise ValueError(f"functions: {self.environment} has its own; leave them out")
        if self.environment == "feedback":
            if self.call_format not in (None, "message"):
                raise ValueError("call_format: feedback does not use tool calls; set message or remove the key")
            if FeedbackArguments.model_validate(self.arguments).num_tries > self.max_turns:
                raise ValueError("arguments.num_tries: is more than max_turns")
        elif self.call_format == "message" and self.environment in ARGUMENTS:
            formats = ", ".join(each for each in get_args(CallFormat) if each != "message")
            raise ValueError(f"call_format: {self.environment} answers calls; accepted: {formats}, null")
        return self

    @property
    def max_environment_tokens(self) -> int:
        """Maximum tokens of all answers of the environment in one trajectory: none follows the last turn."""
        return (self.max_turns - 1) * self.max_observation_tokens

    @property
    def known_functions(self) -> dict[str, Function]:
        """The functions that a model may call, by name."""
        if self.environment in ARGUMENTS:
            return {name: each for name, each in FUNCTIONS.items() if name == self.environment}
        return {each.name: each for each in self.functions}


def environment_materials(tools: ToolsConfig | None) -> dict[str, Material]:
    """Return the files that an environment's answers depend on: its code or its documents."""
    if tools is not None and is_custom(tools.environment):
        return custom_code_materials([tools.environment])
    if tools is not None and tools.environment == "search":
        path = Path(tools.arguments["file"])
        if path.is_file():
            return {str(path): Material(sha256=file_digest(path), size_bytes=path.stat().st_size)}
    return {}


def _with_ints(value: Any) -> Any:
    """Return a JSON value with an int for each whole number: Kubeflow passes 3 as 3.0."""
    if isinstance(value, dict):
        return {name: _with_ints(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_ints(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
        return int(value)
    return value


class CallError(ValueError):
    """An invalid call of a tool; the message is for the model."""


@dataclass(frozen=True)
class Call:
    """A call of a tool by a model.

    >>> [call] = find_calls('<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>', "tool_call")
    >>> call.text("query")
    'Paris'
    """

    name: str
    """Name of the function, or label of the fenced block."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a call in JSON."""
    block: str | None = None
    """Text of a fenced block; None for a call in JSON."""
    error: str = ""
    """Syntax error, for the model; empty if the call can be read."""

    def text(self, argument: str) -> str:
        """Return the fenced block, or the argument of that name; CallError if the argument is not a text."""
        if self.block is not None:
            return self.block
        value = self.arguments.get(argument)
        if not isinstance(value, str):
            raise CallError(f'`{self.name}` takes one argument, the text "{argument}".')
        return value


def find_calls(text: str, call_format: CallFormat | None) -> list[Call]:
    """Return the calls of a turn, in order. Calls inside <think> are ignored.

    A fenced block is a call if nothing follows it: a turn has at most one. A call that cannot be read has an `error`.
    Without a format, fenced blocks count if there is no call in JSON.
    """
    answer = text.rpartition(_END_OF_THOUGHT)[2]
    if _THOUGHT in answer:  # the thought has not ended
        return []
    if call_format in ("tool_call", None):
        calls = [_json_call(each) for each in answer.split(_OPEN)[1:]]
        if calls or call_format == "tool_call":
            return calls
    fenced = _fenced_call(answer) if call_format in ("fenced", None) else None
    return [fenced] if fenced else []


def _json_call(text: str) -> Call:
    content, is_closed, _ = text.partition(_CLOSE)
    if not is_closed:
        return Call("", error=f"The call does not end with {_CLOSE}. {_ACCEPTED}")
    try:
        call = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:_MAX_SHOWN_CHARACTERS]
        return Call("", error=f"The call is not valid JSON ({reason}). {_ACCEPTED}")
    match call:
        case {"name": str(name), "arguments": dict(arguments)}:
            return Call(name, arguments)
    return Call("", error=f'The call needs a "name" that is text and "arguments" that are an object. {_ACCEPTED}')


def _fenced_call(answer: str) -> Call | None:
    """Return the fenced block at the end of an answer as a call; None if the answer does not end in one."""
    lines = answer.rstrip().split("\n")
    last = len(lines) - 1
    start: int | None = None
    for number, line in enumerate(lines):
        if start is None and line.startswith(FENCE):
            start = number
        elif start is not None and line.rstrip() == FENCE:
            if number == last:
                label = lines[start].removeprefix(FENCE).strip()
                block = "\n".join(lines[start + 1 : number])
                return Call(label, block=block, error="" if label else _LABEL_IS_MISSING)
            start = None
    if start == last and lines[last].rstrip() == FENCE:  # a bare fence at the end, which closes no block
        return Call("", error=_LABEL_IS_MISSING)
    return None


def as_fenced_output(text: str) -> str:
    """Return the block with which an environment answers a fenced call, with a fence longer than any in the text."""
    inner = _FENCES.findall(text)
    fence = max(inner, key=len) + "`" if inner else FENCE
    return f"{fence}{OUTPUT}\n{text}\n{fence}\n"


def split_outputs(text: str) -> list[tuple[str, bool]]:
    """Return the non-empty parts of a solution as (part, is_output); an output is the block after a fenced call."""
    parts, start = [], 0
    for output in _OUTPUT.finditer(text):
        parts += [(text[start : output.start()], False), (output[0], True)]
        start = output.end()
    parts.append((text[start:], False))
    return [(part, is_output) for part, is_output in parts if part]


def output_text(block: str) -> str:
    """Return the text between the fences of a block of output."""
    first_line, _, rest = block.partition("\n")
    fence = first_line.removesuffix(OUTPUT)
    return rest.rstrip("\n").removesuffix(fence).removesuffix("\n")


def as_tool_call(turn: str, functions: Mapping[str, Function]) -> str:
    """Return a turn that ends in a fenced call with a call in JSON instead; CallError if it calls no known function."""
    call = next(iter(find_calls(turn, "fenced")), None)
    function = functions.get(call.name) if call else None
    if call is None or function is None or not function.arguments:
        callee = f'"{call.name}"' if call else "nothing"
        raise CallError(f"calls {callee}; functions that take a block: {', '.join(functions) or 'none'}")
    before = turn[: turn.rindex(f"{FENCE}{call.name}")].rstrip("\n")
    argument = next(iter(function.arguments))
    json_call = json.dumps({"name": call.name, "arguments": {argument: call.block}}, ensure_ascii=False)
    tagged = f"{_OPEN}\n{json_call}\n{_CLOSE}"
    return f"{before}\n{tagged}" if before else tagged
