"""Code answers in other fences than three backticks and `python`, or in none, and prose that is no code."""

import random

from tests.grading.classes.member import Generator, Member

_NAMES = ("add", "total", "combine", "solve", "compute", "f", "merge_values", "count_items")
_OPERATORS = ("+", "-", "*")
_LABELS = ("python", "Python", "py", "python3", "python3.11", "")
_ATTRIBUTES = (
    ' title="solution.py"', " linenums", " {.line-numbers}", " showLineNumbers", ' title="x" {1,3}', ":solution.py",
    "{1,3}", " copy",
)  # fmt: skip
_BEFORE = (
    "", "I combine them.\n\n", "Here is the function:\n\n", "import statements are not needed here.\n\n",
    "The idea: from left to right, we go on.\n\nclass of problems: easy\n\n", "# Solution\n\n",
    "def is a keyword of Python.\n\n", "Let x = 5 be given.\n\n", "x = 5\ny = x + 1\n\nNow the code.\n\n",
    "Step 1. Read the numbers.\nStep 2. Combine them.\n\n",
)  # fmt: skip
_AFTER = (
    "", "\n\nIt takes constant time.", "\n\nDone", "\n\nComplexity: constant", "\n\nThat's all.",
    "\n\nNote (important): it works.", "\n\nThis function is short, isn't it?",
    "\n\nfor all numbers it gives the result",
)  # fmt: skip


def _function(generator: random.Random, name: str, operator: str) -> str:
    body = generator.choice((
        f"    return a {operator} b",
        f"    result = a {operator} b\n\n    return result",
        f'    """Combine two numbers.\n\nThe result is a number.\n    """\n    return a {operator} b',
        f"    # combines them\n    if a > b:\n        return a {operator} b\n    return a {operator} b",
    ))  # fmt: skip
    before = generator.choice(("", "import math\n\n", "from functools import cache\n\n\n@cache\n", "SIZE = 5\n\n\n"))
    after = generator.choice(("", f"\n\n\nprint({name}(1, 2))", f"\n\n\ndef main():\n    print({name}(1, 2))"))
    return f"{before}def {name}(a, b):\n{body}{after}"


def _fenced(generator: random.Random, code: str) -> str:
    label, indent = generator.choice(_LABELS), generator.choice(("    ", "\t"))
    long, tildes = "`" * generator.randint(4, 7), "~" * generator.randint(3, 5)
    braces = generator.choice(("{.python}", "{python}", "{.python .numberLines}", "{ .py }"))
    return generator.choice((
        f"{long}{label}\n{code}\n{long}",
        f"```python{generator.choice(_ATTRIBUTES)}\n{code}\n```",
        f"{tildes}{generator.choice((' ', ''))}{label}\n{code}\n{tildes}",
        f"```{braces}\n{code}\n```",
        f'````{label}\nUSAGE = """\n```python\nsolve(1, 2)\n```\n"""\n\n{code}\n````',
        "\n".join(indent + line if line else "" for line in code.split("\n")),
        code,
    ))  # fmt: skip


def fences(generator: random.Random) -> Member:
    """Right or wrong code, however it is set apart."""
    name, operator = generator.choice(_NAMES), generator.choice(_OPERATORS)
    is_right = generator.random() < 0.5
    written = operator if is_right else generator.choice([each for each in _OPERATORS if each != operator])
    tests = []
    for _ in range(3):
        one, other = generator.sample(range(5, 50), 2)
        tests.append(f"assert {name}({one}, {other}) == {eval(f'{one} {operator} {other}')}")
    code = _fenced(generator, _function(generator, name, written))
    response = generator.choice(_BEFORE) + code + generator.choice(_AFTER)
    return Member("\n".join(tests), response, "right" if is_right else "wrong")


def several_blocks(generator: random.Random) -> Member:
    """A first attempt and a correction, of which the last counts, or code and its output or use."""
    name, operator = generator.choice(_NAMES), generator.choice(_OPERATORS)
    other = generator.choice([each for each in _OPERATORS if each != operator])
    last_is_right = generator.random() < 0.5
    first, last = (other, operator) if last_is_right else (operator, other)
    fence = generator.choice(("```", "````", "~~~"))
    one, two = generator.sample(range(5, 50), 2)
    blocks = [f"{fence}python\n{_function(generator, name, each)}\n{fence}" for each in (first, last)]
    between = generator.choice(("No, that is wrong:", "Better:", "Now with names that say more:", "Corrected:"))
    after = generator.choice(
        ("", f"\n\nIt prints\n\n{fence}\n{one}\n{fence}", f"\n\n{fence}bash\npython {name}.py\n{fence}")
    )
    response = f"{blocks[0]}\n\n{between}\n\n{blocks[1]}{after}"
    tests = [f"assert {name}({pair}) == {eval(pair.replace(',', operator))}" for pair in (f"{one}, {two}", "7, 90")]
    return Member("\n".join(tests), response, "right" if last_is_right else "wrong")


def prose(generator: random.Random) -> Member:
    """Text about code, code in another language, or a piece that defines nothing: no code answer."""
    name = generator.choice(_NAMES)
    one, other = generator.sample(range(5, 50), 2)
    text = generator.choice((
        f"def {name} should combine {one} and {other}.",
        f"class {name} returns {one + other}",
        f"import the numbers {one} and {other}, from which {name} follows.",
        f"{name} = {one} + {other}",
        f"Define {name} as a function of a and b that returns a + b.",
        f"`def {name}(a, b): return a + b`",
        f"We write def {name}(a, b): return a + b and are done.",
        f"    {name}({one}, {other})\n    {one + other}",
        f"def {name}(a, b)\n    return a + b",
        f"```javascript\nfunction {name}(a, b) {{ return a + b; }}\n```",
        f"~~~bash\ndef {name}(a, b): return a + b\n~~~",
        f"````python\ndef {name}(a, b):\n    return a + b\n```",
        f"~~~python\ndef {name}(a, b):\n    return a + b\n```",
        f"Answer: {one + other}",
        f"from {name} import {name}",
    ))  # fmt: skip
    response = generator.choice(_BEFORE) + text + generator.choice(_AFTER)
    return Member(f"assert {name}({one}, {other}) == {one + other}", response, "wrong")


CLASSES: dict[str, Generator] = {
    "code-fences": fences,
    "several-code-blocks": several_blocks,
    "prose-is-no-code": prose,
}
