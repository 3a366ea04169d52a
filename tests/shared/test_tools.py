"""Tools: the keys that choose an environment, and calls as models write them."""

from pathlib import Path

import pytest

from components.shared.config import problems
from components.shared.lineage import file_digest
from components.shared.model import ModelConfig
from components.shared.tools import (
    Call,
    CallError,
    Function,
    FunctionArgument,
    ToolsConfig,
    as_fenced_output,
    as_tool_call,
    environment_materials,
    find_calls,
    output_text,
    split_outputs,
)

FENCED = "Multiply.\n```calculator\n37*48\n```\n"
SOLUTION = FENCED + "```output\n1776\n```\n#### 1776"


def _json(content: str) -> str:
    return f"Multiply.\n<tool_call>\n{content}\n</tool_call>"


def test_a_block_at_the_end_of_a_turn_is_a_call() -> None:
    """The last of several, whether a stop text or an end token ended the turn, and with its text as it is."""
    for end in ("", "\n\n"):
        assert find_calls(FENCED.rstrip("\n") + end, "fenced") == [Call("calculator", block="37*48")]
    text = "```text\na table\n```\nNow:\n```python\n\nx = '```'\n    print(x)\n```\n"
    assert find_calls(text, "fenced") == [Call("python", block="\nx = '```'\n    print(x)")]


@pytest.mark.parametrize(
    "text",
    [
        "#### 2",
        FENCED + "So it is 1776.",
        "```calculator\n1+1\n",
        "```calculator 1+1```",
        "<think>\n" + FENCED,
        "<think>\n" + FENCED + "</think>\nIt is 1776.",
    ],
)
def test_what_is_no_block_at_the_end_calls_nothing(text: str) -> None:
    """An open block, text behind it, or one in a thought."""
    assert find_calls(text, "fenced") == []


def test_the_calls_in_json_are_found_in_their_order() -> None:
    """Wherever they stand but in a thought; one that cannot be read is among them."""
    first = '{"name": "search", "arguments": {"query": "a"}}'
    last = '{"name": "calculator", "arguments": {"expression": "37*48"}}'
    both = [Call("search", {"query": "a"}), Call("calculator", {"expression": "37*48"})]
    assert find_calls(_json(first) + _json(last) + "\nSo.", "tool_call") == both
    middle = find_calls(_json(first) + _json("{") + _json(last), "tool_call")
    assert [bool(call.error) for call in middle] == [False, True, False]
    assert find_calls(f"<think>{_json(first)}</think>{_json(last)}", "tool_call") == both[1:]
    assert find_calls(f"<think>a</think><think>{_json(first)}", "tool_call") == []
    assert find_calls(FENCED, "tool_call") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```\n1+1\n```\n", "begins with three backticks and the name of the tool."),
        ("Let me see:\n```\n", "begins with three backticks and the name of the tool."),
        (_json("{'name': 1}"), "is not valid JSON (Expecting property name"),
        (_json("[" * 100_000), "is not valid JSON"),
        (_json("1" * 10_000), "is not valid JSON"),
        (_json('{"name": "calculator", "arguments": "1+1"}'), 'needs a "name" that is text and "arguments" that are'),
        (_json("{}").removesuffix("</tool_call>"), "does not end with </tool_call>"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_what_is_accepted(text: str, message: str) -> None:
    """To the model, in a few words. Without a format both kinds are found; a message calls nothing."""
    (call,) = find_calls(text, None)
    assert message in call.error
    assert len(call.error) < 400
    assert [call] == find_calls(text, "tool_call" if "<tool_call>" in text else "fenced")
    assert find_calls(text, "message") == []
    if "<tool_call>" in text:
        assert call.error.endswith('Write {"name": NAME, "arguments": {...}} between <tool_call> and </tool_call>.')


def test_the_text_of_a_call_is_its_block_or_its_argument() -> None:
    """Any other argument is an error that names the right one."""
    assert Call("python", block="1").text("code") == "1"
    assert Call("python", {"code": "2"}).text("code") == "2"
    for arguments in ({"source": "2"}, {"code": 2}, {}):
        with pytest.raises(CallError, match='takes one argument, the text "code"'):
            Call("python", arguments).text("code")


def test_a_solution_is_split_at_the_output_of_its_calls() -> None:
    """Nothing is lost, and a block of output that follows no call is the model's."""
    assert split_outputs(SOLUTION) == [(FENCED, False), ("```output\n1776\n```\n", True), ("#### 1776", False)]
    several = FENCED + "```output\na\n\nb\n```\n" + FENCED + "```output\n```\nEnd"
    assert [is_output for _, is_output in split_outputs(several)] == [False, True, False, True, False]
    assert "".join(text for text, _ in split_outputs(several)) == several
    assert [output_text(text) for text, is_output in split_outputs(several) if is_output] == ["a\n\nb", ""]
    alone = "See:\n```output\n1\n```\n"
    assert split_outputs(alone) == [(alone, False)]
    assert split_outputs("") == []


@pytest.mark.parametrize("text", ["```python\n1\n```\n", "````\na\n````", "", "a ``` b"])
def test_an_output_may_have_fences_of_its_own(text: str) -> None:
    """All of it is the environment's, and none of what the model writes next."""
    block = as_fenced_output(text)
    solution = FENCED + block + "#### 1\n```\n"
    assert split_outputs(solution) == [(FENCED, False), (block, True), ("#### 1\n```\n", False)]
    assert output_text(block) == text


def test_a_fenced_call_is_written_in_json() -> None:
    """With the block as the first argument of its function."""
    functions = ToolsConfig(environment="calculator").known_functions
    expected = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37*48"}}\n</tool_call>'
    assert as_tool_call(FENCED, functions) == f"Multiply.\n{expected}"
    assert as_tool_call(FENCED.removeprefix("Multiply.\n"), functions) == expected
    with pytest.raises(CallError, match='calls "python"; functions that take a block: calculator'):
        as_tool_call("```python\n1\n```\n", functions)


def test_a_function_is_shown_as_a_json_schema() -> None:
    """In one order, whatever order its arguments were written in."""
    arguments = {"unit": FunctionArgument(required=False), "city": FunctionArgument(description="Where.")}
    schema = Function(name="weather", description="Tells.", arguments=arguments).json_schema
    properties = {"city": {"type": "string", "description": "Where."}, "unit": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": "weather", "description": "Tells.", "parameters": parameters}
    assert schema == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"environment": "calculater"}, 'tools.environment: no such environment, got "calculater"; accepted: '),
        ({"environment": "python", "arguments": {"max_cals": 3}}, "tools.arguments.max_cals: no such argument of pyth"),
        ({"environment": "search"}, "tools.arguments.file: required key is missing"),
        ({"environment": "calculator", "functions": [{"name": "x"}]}, "tools.functions: calculator has its own"),
        ({"environment": "feedback", "call_format": "fenced"}, "tools.call_format: feedback does not use tool calls"),
        ({"environment": "calculator", "call_format": "message"}, "tools.call_format: calculator answers calls"),
        ({"environment": "feedback", "arguments": {"num_tries": 5}}, "tools.arguments.num_tries: is more than max_tu"),
        ({"environment": "calculator", "call_format": "tool_call"}, "tools.call_format: tool_call is for chat templ"),
        ({"environment": "feedback", "arguments": {"answer": "boxed"}}, ": tools.arguments.answer and answer must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tools: dict[str, object], message: str) -> None:
    """Before any file is read, by the name of the key."""
    (problem,) = problems(ModelConfig, {"base": "x", "tools": tools}, name="model")
    assert problem.removeprefix("model").removeprefix(".").startswith(message)


def test_whole_numbers_reach_an_environment_as_ints() -> None:
    """Kubeflow passes all numbers as floats; in lists and objects of an own environment too."""
    whole = ToolsConfig.model_validate({"environment": "python", "arguments": {"max_calls": 3.0}})
    assert repr(whole.arguments) == "{'max_calls': 3}"
    arguments = {"sizes": [1.0, {"x": 2.0}], "rate": 0.5, "most": 1e300, "flag": True, "none": None}
    tools = ToolsConfig(environment="games.maze:Maze", arguments=arguments, functions=[Function(name="go")])
    expected = {"flag": True, "most": 1e300, "none": None, "rate": 0.5, "sizes": [1, {"x": 2}]}
    assert repr(tools.arguments) == repr(expected)
    assert list(tools.known_functions) == ["go"]


def test_lineage_has_the_files_that_decide_what_an_environment_answers(tmp_path: Path) -> None:
    """Of an own class its module, of a search its documents; nothing for what is not there."""
    documents = tmp_path / "documents.jsonl"
    documents.write_text("{}", encoding="utf-8")
    search = ToolsConfig(environment="search", arguments={"file": str(documents)})
    (material,) = environment_materials(search).values()
    assert (material.sha256, material.size_bytes) == (file_digest(documents), 2)
    own = environment_materials(ToolsConfig(environment="tests.environments.own:Counting"))
    assert list(own) == ["tests.environments.own:Counting"]
    documents.unlink()
    own_names = ("no_such.module:Any", "tests.no_such:Any", "tests.environments.own.no_such:Any")
    for tools in (search, *(ToolsConfig(environment=name) for name in own_names), None):
        assert environment_materials(tools) == {}
