"""MBPP: short programming tasks in words, each with a solution and with assert statements that test it."""

import ast
from typing import Any, Literal

from components.grading.unit_tests import UnreadableTestsError, last_code_block, read_tests
from components.prepare_data.source import Fields, FileSource, MalformedRowError, excerpt, text

_QUESTION = "{task}\nAnswer with a Python code block that passes tests like:\n{test}"


class MBPP(FileSource):
    """MBPP, full or sanitized: programming tasks with `text` or `prompt`, `code` and `test_list`."""

    kind: Literal["mbpp"]

    def read_row(self, columns: dict[str, Any]) -> Fields:
        """Return the problem; the column of the task is `text` in the full dataset, and `prompt` in the sanitized one.

        The question shows the first test, which has the name and the arguments of the function. The others stay hidden,
        so an answer that just returns the value in the question does not pass.
        """
        code = text(columns, "code").replace("\r\n", "\n").strip()
        solution = f"```python\n{code}\n```"
        if last_code_block(solution) != code:
            raise MalformedRowError("column `code` contains a code fence, so it does not fit into a code block")
        asserts = _statements(columns, "test_list")
        try:
            tests = read_tests("\n".join(asserts))
        except UnreadableTestsError as error:
            raise MalformedRowError(f"column `test_list`: {error}") from None
        calls = "\n".join(test.call for test in tests)
        used = {node.id for node in ast.walk(ast.parse(calls)) if isinstance(node, ast.Name)}
        imported = sorted(_imported_names(columns) & used)
        if imported:  # the grader runs the tests without their imports
            raise MalformedRowError(f"the tests call {imported[0]}, which they import; they may only call the solution")
        question = _QUESTION.format(task=text(columns, "prompt", "text").strip(), test=asserts[0])
        return Fields(question, solution, answer="\n".join(asserts))


def _statements(columns: dict[str, Any], name: str) -> list[str]:
    """Return the statements in a column; MalformedRowError unless it has a list of them."""
    values = columns.get(name)
    if not isinstance(values, list) or not values:
        raise MalformedRowError(f"column `{name}` is {excerpt(values)}, expected a list of Python statements")
    return [text({name: value}, name).strip() for value in values]


def _imported_names(columns: dict[str, Any]) -> set[str]:
    """Return the names that the tests import; MalformedRowError if their set-up does more than import."""
    lines = _statements(columns, "test_imports") if columns.get("test_imports") else []
    lines += [text(columns, "test_setup_code")] if columns.get("test_setup_code") else []
    try:
        statements = ast.parse("\n".join(lines)).body
    except (SyntaxError, ValueError) as error:
        raise MalformedRowError(f"`test_imports` and `test_setup_code` are not valid Python: {error}") from None
    imports = [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]
    if len(imports) < len(statements):
        raise MalformedRowError("column `test_setup_code` does more than import")
    return {(each.asname or each.name).partition(".")[0] for statement in imports for each in statement.names}
