"""Tools that fit neither the chat template of the base model nor the problems, before the first stage."""

from pathlib import Path
from typing import Any

import pytest

from components.preflight.config import Params, load_params
from components.preflight.inputs import unusable_tools
from components.shared.errors import PipelineError
from pipelines.requirements import missing_here
from tests import chat_model
from tests.presets import ROOT, preset

KEY = "train_sft.model.tools"
MBPP = {"kind": "mbpp", "train": "train.jsonl", "test": "test.jsonl", "name": "programs"}
OWN = {"environment": "tests.environments.own:Counting", "functions": [{"name": "count"}]}


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
    """What the template puts around it counts; with one token more or less it is accepted or refused."""
    base: Path | str = chat_model.write(tmp_path, template) if template else "scratch:tiny"
    (line,) = _lines({**tools, "max_observation_tokens": 1}, base=base)
    assert line.startswith(f"{KEY}.max_observation_tokens: is 1, and one character of an environment")
    named = int(line.removesuffix(" or more").rpartition(" ")[2])
    assert least in (None, named)
    assert _lines({**tools, "max_observation_tokens": named}, base=base) == []
    assert len(_lines({**tools, "max_observation_tokens": named - 1}, base=base)) == 1
    (line,) = _lines(base=base, evaluation={**tools, "max_observation_tokens": named - 1})
    assert line.startswith(f"evaluate.tools.max_observation_tokens: is {named - 1}, and")


def test_a_model_that_learns_its_vocabulary_from_the_problems_is_measured_later() -> None:
    """Its tokenizer does not exist yet."""
    assert _lines({"environment": "calculator", "max_observation_tokens": 1}, base="scratch:math") == []


@pytest.mark.parametrize("environment", ["python", "calculator"])
@pytest.mark.parametrize("call_format", ["fenced", None])
def test_code_that_would_be_a_call_is_refused(environment: str, call_format: str | None) -> None:
    """By each source whose answers are code, with the format to set instead."""
    tools = {"environment": environment, "call_format": call_format}
    line = (
        f"{KEY}.call_format: is fenced, so that the code that answers a problem from programs would call {environment}"
        "; set it to tool_call, for a model whose chat template shows tools"
    )
    assert _lines(tools, sources=[MBPP]) == [line]
    assert _lines(tools) == []
    assert _lines(sources=[MBPP], evaluation=tools) == [line.replace(KEY, "evaluate.tools")]
    train_only = [{**MBPP, "test": None, "test_fraction": 0.0}]
    assert _lines(sources=train_only, evaluation=tools) == []


def test_code_may_be_the_answer_where_calls_are_no_fenced_blocks(tmp_path: Path) -> None:
    """With calls in JSON, or without any."""
    calling = chat_model.write(tmp_path, chat_model.CALLING)
    assert _lines({"environment": "python", "max_observation_tokens": 99}, base=calling, sources=[MBPP]) == []
    assert _lines({"environment": "feedback"}, sources=[MBPP]) == []
    assert _lines({"environment": "tests.environments.own:Counting"}, sources=[MBPP]) == []


def test_functions_that_no_model_is_shown_are_refused(tmp_path: Path) -> None:
    """The format may be set, or follow from the chat template."""
    rest = f"; leave them out, or set {KEY}.call_format: tool_call"
    start = f"{KEY}.functions: are shown to a model that calls tools with tool_call, and the format is "
    calling, plain = (
        chat_model.write(tmp_path / name, text)
        for name, text in (("calling", chat_model.CALLING), ("plain", chat_model.CHATML))
    )
    assert _lines(OWN, base=calling) == []
    assert _lines({**OWN, "call_format": "message"}, base=calling) == [f"{start}message{rest}"]
    assert _lines(OWN, base=plain) == _lines(OWN) == [f"{start}fenced{rest}"]


def test_a_template_that_knows_no_tools_is_named_by_the_key_of_tools(tmp_path: Path) -> None:
    """And by no other key beside it."""
    base = chat_model.write(tmp_path, chat_model.CHATML)
    tools = {"environment": "calculator", "call_format": "tool_call", "max_observation_tokens": 99}
    (line,) = [each for each in missing_here(_params(tools, base=base)) if "tool" in each]
    assert line.startswith(f"{KEY}.call_format: the chat template of {base} shows no tools")


@pytest.mark.parametrize("base", ["/work/models/none", "./none"])
def test_a_model_that_cannot_be_read_here_is_judged_by_the_params(base: str) -> None:
    """On a cluster it may be on the volume; another check reports one that is missing."""
    tools = {"environment": "python", "call_format": "fenced", "max_observation_tokens": 1}
    (line,) = _lines(tools, base=base, sources=[MBPP])
    assert line.startswith(f"{KEY}.call_format: is fenced")


@pytest.mark.parametrize(
    ("tools", "file", "message"),
    [
        ("{environment: feedback}", "tools.yaml", "call_format: feedback "),
        ("{environment: feedback, call_format: fenced}", "own.yaml", "call_format: feedback "),
        ("{functions: [{name: f}]}", "own.yaml", "functions: calculator "),
    ],
)
def test_a_value_that_contradicts_another_is_named_by_its_file(
    tmp_path: Path, tools: str, file: str, message: str
) -> None:
    """The preset's where the value is inherited from there, else the one that extends it."""
    (tmp_path / "tools.yaml").write_text((ROOT / "params/tools.yaml").read_text().replace("../", f"{ROOT}/"))
    path = tmp_path / "own.yaml"
    path.write_text(f"extends: tools.yaml\ntrain_sft: {{model: {{tools: {tools}}}}}\n")
    with pytest.raises(PipelineError) as refused:
        load_params(path)
    (number,) = (
        number for number, line in enumerate((tmp_path / file).read_text().splitlines(), 1) if "tools: {" in line
    )
    assert str(refused.value).startswith(f"{tmp_path / file}:{number}: {KEY}: {message}")
