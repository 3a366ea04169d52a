"""Mutations of notation: one token, sign, digit or component, of which the strict reader tells that it matters."""

import random
import re
from collections.abc import Callable

from tests.grading.hacks.meaning import differ, read
from tests.grading.hacks.rights import Mutant, Right, any_right, framed, integer

_TOKEN = re.compile(r"\\begin\{[a-z]+\}|\\end\{[a-z]+\}|\\[a-zA-Z]+|\\.|[0-9]|[a-zA-Z]|\s+|.", re.DOTALL)
Rewrite = Callable[[random.Random, str], str | None]
REWRITES: dict[str, Rewrite] = {}


def _rewrite(function: Rewrite) -> Rewrite:
    REWRITES[function.__name__.strip("_").replace("_", "-")] = function
    return function


def _replace_one(generator: random.Random, text: str, pattern: str, new: Callable[[re.Match[str]], str]) -> str | None:
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    match = generator.choice(found)
    return text[: match.start()] + new(match) + text[match.end() :]


@_rewrite
def _drop_token(generator: random.Random, text: str) -> str | None:
    """Drop a digit, a letter, a sign, a command or a bracket."""
    tokens = _TOKEN.findall(text)
    del tokens[generator.randrange(len(tokens))]
    return "".join(tokens)


@_rewrite
def _drop_sign(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator, text, r"[-+]", lambda match: generator.choice((" ", "", "+" if match[0] == "-" else "-"))
    )


@_rewrite
def _change_digit(generator: random.Random, text: str) -> str | None:
    return _replace_one(generator, text, "[0-9]", lambda _: str(generator.randrange(10)))


@_rewrite
def _insert_digit(generator: random.Random, text: str) -> str | None:
    return _replace_one(generator, text, "[0-9]", lambda match: match[0] + str(generator.randrange(10)))


@_rewrite
def _swap_digits(generator: random.Random, text: str) -> str | None:
    return _replace_one(generator, text, "[0-9]{2}", lambda match: match[0][::-1])


@_rewrite
def _move_point(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator,
        text,
        r"[0-9]\.[0-9]|[0-9](?=[0-9])",
        lambda match: "." + match[0].replace(".", "") if "." in match[0] else match[0] + ".",
    )


@_rewrite
def _change_operator(generator: random.Random, text: str) -> str | None:
    signs = (" + ", " - ", r" \cdot ", "/", "^", "", ", ", r" \times ", " = ")
    return _replace_one(generator, text, r"\s*(?:[-+/^,]|\\cdot|\\cup)\s*", lambda _: generator.choice(signs))


@_rewrite
def _swap_fraction(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator, text, r"(\\d?frac)(\{[^{}]*\})(\{[^{}]*\})", lambda match: match[1] + match[3] + match[2]
    )


@_rewrite
def _drop_fraction(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator, text, r"\\d?frac\{([^{}]*)\}\{([^{}]*)\}", lambda match: match[generator.choice((1, 2))]
    )


@_rewrite
def _swap_operands(generator: random.Random, text: str) -> str | None:
    operand = r"[0-9a-z.]+(?:\^[0-9])?"
    return _replace_one(
        generator, text, rf"({operand})(\s*[-/^+]\s*)({operand})", lambda match: match[3] + match[2] + match[1]
    )


@_rewrite
def _swap_components(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator, text, r"([^,()\[\]&\\]+)(,|&|\\\\)([^,()\[\]&\\]+)", lambda match: match[3] + match[2] + match[1]
    )


@_rewrite
def _rotate_components(generator: random.Random, text: str) -> str | None:
    """Move the first component to the end."""
    return _replace_one(generator, text, r"([^,()\[\]]+),([^()\[\]]+)", lambda match: f"{match[2]},{match[1]}")


@_rewrite
def _drop_component(generator: random.Random, text: str) -> str | None:
    return _replace_one(generator, text, r",[^,()\[\]{}]+|[^,()\[\]{}]+,|\\\\[^\\]+|\\cup.*|.*\\cup", lambda _: " ")


@_rewrite
def _add_component(generator: random.Random, text: str) -> str | None:
    extra = str(integer(generator))
    if "," not in text:
        return f"{text}, {extra}"
    return _replace_one(generator, text, ",", lambda _: f", {extra},")


@_rewrite
def _repeat_component(generator: random.Random, text: str) -> str | None:
    """One component in the place of another."""
    return _replace_one(
        generator, text, r"([^,()\[\]&]+)(,|&)([^,()\[\]&\\]+)", lambda match: match[1] + match[2] + match[1]
    )


@_rewrite
def _change_brackets(generator: random.Random, text: str) -> str | None:
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    return _replace_one(generator, text, r"[()\[\]]", lambda match: other[match[0]])


@_rewrite
def _move_bracket(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator,
        text,
        r"([()])([^()\\{}])|([^()\\{}])([()])",
        lambda match: (match[2] + match[1]) if match[1] else match[4] + match[3],
    )


@_rewrite
def _add_brackets(generator: random.Random, text: str) -> str | None:
    """Brackets around two operands of a longer expression."""
    return _replace_one(generator, text, r"[0-9a-z]+\s*[-+]\s*[0-9a-z]+", lambda match: f"({match[0]})")


@_rewrite
def _change_letter(generator: random.Random, text: str) -> str | None:
    return _replace_one(generator, text, r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])", lambda _: generator.choice("abcknxyz"))


@_rewrite
def _change_exponent(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator,
        text,
        r"\^(?:\{[^{}]*\}|[0-9a-z])",
        lambda match: generator.choice(("", "^2", "^3", "^{-1}", "_2", "^x", f"{match[0]}^2")),
    )


@_rewrite
def _add_exponent(generator: random.Random, text: str) -> str | None:
    return _replace_one(
        generator,
        text,
        r"[0-9]+(?![0-9.])|(?<![a-zA-Z\\])[a-z](?![a-zA-Z])|\}|\)",
        lambda match: match[0] + generator.choice(("^2", "^3", "^{-1}", "^0", r"^{\frac{1}{2}}")),
    )


@_rewrite
def _change_command(generator: random.Random, text: str) -> str | None:
    functions = (r"\sin ", r"\cos ", r"\tan ", r"\ln ", "")
    return _replace_one(
        generator,
        text,
        r"\\(?:sin|cos|tan|ln)\s*|\\sqrt(?:\[3\])?|\\pi",
        lambda match: generator.choice(
            functions
            if match[0].strip()[1:] in {"sin", "cos", "tan", "ln"}
            else ("e", "i", "x", "3", "")
            if match[0] == r"\pi"
            else ("", r"\sqrt", r"\sqrt[3]", r"\sqrt[4]")
        ),
    )


@_rewrite
def _add_factor(generator: random.Random, text: str) -> str | None:
    factors = (r"\pi", "x", "2", "i", r"\sqrt{2}", "y", "(3)", r"\cdot 2", "/2", r"\times 10", " + 1", " - 1", "e")
    return _replace_one(
        generator,
        text,
        r"[0-9]+(?![0-9.])|(?<![a-zA-Z\\])[a-z](?![a-zA-Z])|\}|\)|$",
        lambda match: match[0] + generator.choice(factors),
    )


@_rewrite
def _wrap(generator: random.Random, text: str) -> str | None:
    """The whole answer in a function or a root."""
    if "," in text or "=" in text or r"\begin" in text or r"\cup" in text:
        return None
    before, after = generator.choice(
        (
            (r"\sqrt{", "}"),
            (r"\frac{1}{", "}"),
            ("-(", ")"),
            ("(", ")^2"),
            (r"\sin(", ")"),
            ("2(", ")"),
            (r"\ln(", ")"),
            (r"\frac{", "}{2}"),
            ("e^{", "}"),
            ("(", ") + 1"),
            ("1 - (", ")"),
            (r"\pi(", ")"),
            ("x(", ")"),
            ("0(", ")"),
        )
    )
    return before + text + after


@_rewrite
def _splice(generator: random.Random, text: str) -> str | None:
    """A part of the answer in the place of another."""
    tokens = _TOKEN.findall(text)
    start, end, source = (generator.randrange(len(tokens)) for _ in range(3))
    return "".join([*tokens[:start], *tokens[source : source + 2], *tokens[max(start, end) :]])


@_rewrite
def _other_answer(generator: random.Random, text: str) -> str | None:
    """Another answer that looks alike."""
    del text
    return any_right(generator).gold


_SURELY_UNREADABLE = re.compile(r"[0-9]\s+[0-9]|^\s*$")


def is_other(gold: str, answer: str) -> bool:
    """Tell whether an answer certainly says something else than the gold."""
    if _SURELY_UNREADABLE.search(answer):
        return False
    ours, theirs = read(gold), read(answer)
    return ours is not None and theirs is not None and differ(ours, theirs)


def rewritten(mutator: str, generator: random.Random, right: Right) -> Mutant | None:
    """Return a response with a rewritten answer that is certainly wrong; None where none was made."""
    if right.words:
        return None
    text = right.gold.partition(r"\text")[0]
    if read(text) is None:
        return None
    for _ in range(4):
        answer = REWRITES[mutator](generator, text)
        if answer and is_other(text, answer) and not _may_be_meant(text, answer):
            response, policy = framed(generator, answer)
            return Mutant(mutator, right.gold, response, right.question, policy)
    return None


def _may_be_meant(gold: str, answer: str) -> bool:
    """Whether a rule of the grader's documentation takes an answer for the gold: a list in brackets."""
    return (
        sorted(re.findall(r"[^\s,]", gold)) == sorted(re.findall(r"[^\s,]", answer))
        and "," in gold
        and (gold[0] not in "([" and "pmatrix" not in gold)
    )
