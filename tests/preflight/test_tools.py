from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params
from components.preflight.inputs import unusable_tools
from pipelines.requirements import missing_here
from tests import chat_model
from tests.presets import preset

KEY = "train_sft.model.tools"
MBPP = {"kind": "mbpp", "train": "train.jsonl", "test": "test.jsonl", "name": "programs"}


def _params(
    tools: dict[str, Any] | None = None,
    *,
    base: Path | str = "scratch:tiny",
    sources: list[dict[str, Any]] | None = None,
    evaluation: dict[str, Any] | None = None,
) -> Params:
    """The smoke preset with tools of training or of evaluation."""
    values = preset()
    values["validate_data"].pop("model")
    chat: dict[str, Any] | None = None if str(base).startswith("scratch:") else {}
    values["train_sft"]["model"] |= {"base": str(base), "chat": chat, "tools": tools}
    values["prepare_data"]["sources"] += sources or []
    values["evaluate"]["tools"] = evaluation
    return Params.model_validate(values)


def _lines(tools: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    return list(unusable_tools(_params(tools, **changes)))


@pytest.mark.parametrize(
    ("template", "tools", "least"),
    [
        (None, {"environment": "calculator"}, 14),
        (None, {"environment": "feedback"}, 6),
        (chat_model.CALLING, {"environment": "calculator"}, None),
        (chat_model.CHATML, {"environment": "feedback"}, None),
    ],
)
def test_the_least_room_for_an_observation_is_named(
    tmp_path: Path, template: str | None, tools: dict[str, Any], least: int | None
) -> None:
    """What the template puts around it counts, to the token; a vocabulary that is still to be learned is unknown."""
    base: Path | str = chat_model.write(tmp_path, template) if template else "scratch:tiny"
    one = {**tools, "max_observation_tokens": 1}
    (line,) = _lines(one, base=base)
    assert line.startswith(f"{KEY}.max_observation_tokens: is 1, and one character of an environment")
    named = int(line.removesuffix(" or more").rpartition(" ")[2])
    assert least in (None, named)
    assert _lines({**tools, "max_observation_tokens": named}, base=base) == []
    (line,) = _lines(base=base, evaluation={**tools, "max_observation_tokens": named - 1})
    assert line.startswith(f"evaluate.tools.max_observation_tokens: is {named - 1}, and")
    assert _lines(one, base="scratch:math") == []


@pytest.mark.parametrize("environment", ["python", "calculator"])
@pytest.mark.parametrize("call_format", ["fenced", None])
def test_code_that_would_be_a_call_is_refused(tmp_path: Path, environment: str, call_format: str | None) -> None:
    """By each source whose answers are code, with the format to set; not where calls are in JSON, or none are made."""
    tools = {"environment": environment, "call_format": call_format}
    line = (
        f"{KEY}.call_format: is fenced, so that the code that answers a problem from programs would call {environment}"
        "; set it to tool_call, for a model whose chat template shows tools"
    )
    assert _lines(tools, sources=[MBPP]) == [line]
    assert _lines({**tools, "call_format": "fenced"}, base="/work/models/none", sources=[MBPP]) == [line]
    assert _lines(tools) == []
    assert _lines(sources=[MBPP], evaluation=tools) == [line.replace(KEY, "evaluate.tools")]
    train_only = [{**MBPP, "test": None, "test_fraction": 0.0}]
    assert _lines(sources=train_only, evaluation=tools) == []
    calling = chat_model.write(tmp_path, chat_model.CALLING)
    in_json = {"environment": environment, "max_observation_tokens": 99}
    assert _lines(in_json, base=calling, sources=[MBPP]) == []
    assert _lines({"environment": "tests.environments.own:Counting"}, sources=[MBPP]) == []


def test_functions_that_no_model_is_shown_are_refused(tmp_path: Path) -> None:
    """The format may be set, or follow from the chat template."""
    own = {"environment": "tests.environments.own:Counting", "functions": [{"name": "count"}]}
    rest = f"; leave them out, or set {KEY}.call_format: tool_call"
    start = f"{KEY}.functions: are shown to a model that calls tools with tool_call, and the format is "
    calling = chat_model.write(tmp_path / "calling", chat_model.CALLING)
    plain = chat_model.write(tmp_path / "plain", chat_model.CHATML)
    assert _lines(own, base=calling) == []
    assert _lines({**own, "call_format": "message"}, base=calling) == [f"{start}message{rest}"]
    assert _lines(own, base=plain) == _lines(own) == [f"{start}fenced{rest}"]


def test_a_template_that_knows_no_tools_is_named_by_the_key_of_tools(tmp_path: Path) -> None:
    """And by no other key beside it."""
    base = chat_model.write(tmp_path, chat_model.CHATML)
    tools = {"environment": "calculator", "call_format": "tool_call", "max_observation_tokens": 99}
    (line,) = [each for each in missing_here(_params(tools, base=base)) if "tool" in each]
    assert line.startswith(f"{KEY}.call_format: the chat template of {base} shows no tools")
