r"""Process supervision (arXiv 2402.03300, section 4.1.3): the steps of a completion, and whether each is right.

A step is a worked line: one that states an equation which can be checked and was not stated before. The text between
two such lines belongs to the later one. The last step ends with the completion and is worth what its answer is worth.

Checked arithmetic says that a line is true, not that it helps. Trivial and repeated equations are no steps, but a
policy can still state new ones that nobody asked for; and since advantages are sums over the steps to come, of two
completions the one with more right steps is preferred. Watch the number of steps when training on this.

Three parts, each called by the one above it: steps of a completion, equations of a line, values of expressions.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, takewhile
from operator import add, mul, sub
from typing import TYPE_CHECKING

from components.grading.verifier import Grade, Verdict

if TYPE_CHECKING:  # torch
    from components.rollout.sampler import Completion

# Steps ----------------------------------------------------------------------------------------------------------------

_ANSWER_MARKERS = ("####", r"\boxed", r"\fbox")
_OUTCOMES = {Verdict.RIGHT: 1.0, Verdict.WRONG: 0.0, Verdict.UNSCORABLE: math.nan}
_INCOMPLETE = "\ufffd"
"""What a byte-level tokenizer decodes an unfinished character to."""


@dataclass(frozen=True)
class Step:
    """One reasoning step of a completion."""

    end: int
    """Completion tokens up to and including the step's last one: it ends at token end - 1."""
    reward: float
    """1 for right, 0 for wrong, NaN for one that cannot be scored."""


@dataclass(frozen=True)
class TextStep:
    """One worked line of a text."""

    end: int
    """Characters up to and including the line's newline, whose token completes the line's last number."""
    right: bool
    """Whether every equation that it adds holds."""


def worked_steps(text: str) -> list[TextStep]:
    """Return the worked lines above the one that holds the last `####` or box.

    A line without a newline is none: it is the answer, or was cut off at the length limit.
    """
    answer = max(text.rfind(marker) for marker in _ANSWER_MARKERS)
    reasoning = text if answer < 0 else text[:answer]
    steps: list[TextStep] = []
    stated: set[Equation] = set()
    end = 0
    for line in reasoning.split("\n")[:-1]:
        end += len(line) + 1
        added = set(equations(line)) - stated
        if added:
            steps.append(TextStep(end, right=all(equation.holds for equation in added)))
            stated |= added
    return steps


def outcome(grade: Grade) -> float:
    """Return what the final answer is worth."""
    return _OUTCOMES[grade.verdict]


def verified_steps(completion: "Completion", grade: Grade, decode: Callable[[Sequence[int]], str]) -> list[Step]:
    """Return the steps of a completion, whose ends increase strictly.

    `decode` turns the first tokens of the completion into the beginning of its text. A step's last token is the first
    with which all of its characters are there. Of steps that would end at the same token one remains: it is right if
    all are, and where the completion itself ends it is the answer.
    """
    ids = completion.tokens.completion_ids
    rewards: dict[int, float] = {}
    end = 0
    for step in worked_steps(completion.text):
        end = bisect_left(
            range(len(ids) + 1),
            step.end,
            lo=end,
            hi=len(ids),
            key=lambda count: len(decode(ids[:count]).rstrip(_INCOMPLETE)),
        )
        rewards[end] = min(rewards.get(end, 1.0), float(step.right))
    rewards[len(ids)] = outcome(grade)
    return [Step(end, reward) for end, reward in rewards.items()]


# Equations ------------------------------------------------------------------------------------------------------------
#
# A line means more than its numbers say: it has units, remainders, unknowns, words that calculate. An equation that
# cannot be read for certain is left out, and so is one whose neighbours could give it another meaning, even where it
# holds: a policy that is rewarded for what holds would learn to write what cannot be called wrong.


@dataclass(frozen=True)
class Equation:
    """Two or more expressions that a line calls equal."""

    sides: frozenset[tuple[tuple[Fraction, ...], Fraction | None]]
    """The operands and the value of each: the same for 3+5=8, 8=5+3 and 3*1+5+0=8.0, one fact stated three times."""
    holds: bool


_MARK = re.compile(r"<<([^<>]*)>>")
_RESULT = re.compile(r" ?\$? ?((?:\d++(?:,\d++)*+(?:\.\d++)?+|\.\d++))(?![/:%])")
_FRACTION = (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r" ((\1)/(\2))")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\\", " ; "),
        (r"\\(?:text|textbf|mbox|mathrm|mathbf)\{([^{}]*)\}", r" \1 "),
        # Spacing, bold, degrees, and the marks around formulas and before money.
        (r"\\!", ""),
        (r"\\[()\[\],;: ]|\\(?:left|right|displaystyle)(?![A-Za-z])|\\?[$£€]|\*\*|[&~`]", " "),
        (r"\^ ?\{? ?\\circ ?\}?|°", " "),
        (r"\\%", "%"),
        (r"\{,\}", ","),
        (r"\^\{([^{}]*)\}", r"^(\1)"),
        _FRACTION,
        _FRACTION,  # once more for those inside of another
        ("[\u00d7\u00b7\u22c5\u2217]|" + r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        ("\u00f7|" + r"\\div(?![A-Za-z])", "/"),
        ("[\u2212\u2013]", "-"),
        (r"\s+", " "),
        (r"(?<=[\d)%]) ?[xX](?= ?\.?\d)|(?<=[\d)%]) [xX] (?=\()", "*"),
        (r"% of (?=[\d(.])", "%*"),
        (r"(?<=[\d)])\(", "*("),
        (r"^ ?(?:[-*\u2022] |\(?\w{1,2}\) |\d{1,2}\. )", ""),  # the bullet or number of a list
    ]
]
# A name takes the bracket behind it along: what a function is applied to is no expression of its own.
_TOKEN = re.compile(
    r"(?:\d++(?:[.,:]\d++)*+|\.\d++)\w*+|\w+(?:['\u2019]\w+)?\(?|\\[A-Za-z]+|\.{2,}|[<>!:=~]=|=[=<>~]|\S"
)

_PLAIN = re.compile(r"a|[A-Za-z]{2,}(?:['\u2019][A-Za-z]+)?\(?|[,;:.?()\"']")
_UNCLEAR_BEFORE = re.compile(
    r"(?:\b(?:plus|minus|times|over|(?:divided|multiplied) by|(?:half|thirds?|quarters?|fifths?|percent) of)"
    r"|\b(?:half|double|twice|triple|not|mod)|\d of|\d and) \S+$|\d , \d{3}$",
    re.IGNORECASE,
)
"""Half of 10 + 4; 1 and 1/4; 14, 400."""
_UNCLEAR_AFTER = re.compile(
    r"(?:plus|minus|times \d|over|divided|multiplied|squared|cubed|percent|cents?)\b"
    r"|(?:dozens?|hundred|thousand|(?:m|b|tr)illion)\b|of \d|, \d{3}(?!\d)|and \(? ?\d+ /|\. \\"
    r"|(?:hours?|minutes?|days?|weeks?|months?|years?|feet|foot|yards?|pounds?|dollars?) (?:and )?\d",
    re.IGNORECASE,
)
r"""4 million; 1/2 of 20; 14, 400; 16 and 2/3; 0.\overline{3}; 1 hour and 30 minutes."""
_REMAINDERS = re.compile(r"mod(?:ulo)?(?![a-z])|remainder|\u2261|\\equiv", re.IGNORECASE)
_AMBIGUOUS = re.compile(r"/ \S+ /|(?=.*[-+])(?=.*%).*\d(?: [^%]|$)")
"""25 / 1/3 may mean 75, and 80 - 20% may mean 64."""


def equations(line: str) -> list[Equation]:
    """Return the equations of a line; each mark of a calculator, such as `<<48/2=24>>24`, is one of its own.

    A mark's result and the number written behind it have to agree. A number with decimals equals what rounds to it, a
    whole number only itself; where it may have been cut or rounded to a whole one, nothing is said. A quotient by zero
    equals nothing. What needs no calculation (5 = 5, 5 + 0 = 5, 2 * 3 = 3 * 2) is no equation here. Takes time in
    proportion to the length of the line.
    """
    bare = [] if _REMAINDERS.search(line) else list(_chains(_MARK.sub(" ", line)))
    clear = [chain for chain in bare if all(side.clear for side in chain)]
    marked = [chain for mark in _MARK.finditer(line) for chain in _chains(_calculation(line, mark))]
    return [equation for chain in [*clear, *marked] if (equation := _equation(chain))]


def _calculation(line: str, mark: re.Match[str]) -> str:
    """What a mark states, with the number written behind it; a loss may be written there as `80 less`."""
    result = _RESULT.match(line, mark.end())
    return f"{mark[1]}={result[1]}" if result and "=-" not in mark[1] else mark[1]


@dataclass(frozen=True)
class _Side:
    """An expression that stands on one side of an equals sign."""

    tokens: Sequence[str]
    expression: "Expression"
    clear: bool
    """Whether nothing in it or beside it gives it another meaning."""


def _equation(chain: Sequence[_Side]) -> Equation | None:
    """The equation that a chain of sides makes; None where it calculates nothing or depends on how it is read."""
    expressions = [side.expression for side in chain]
    holds = _all_agree(expressions)
    trivial = holds and len({expression.operands for expression in expressions}) == 1
    if holds is None or trivial or not any(expression.calculates for expression in expressions):
        return None
    if not holds and _holds_in_percent(chain):
        return None
    return Equation(frozenset((expression.operands, expression.value) for expression in expressions), holds)


def _all_agree(expressions: Sequence["Expression"]) -> bool | None:
    """Whether each is equal to the next one; None where that depends on how they were rounded."""
    verdicts = {_agree(left, right) for left, right in pairwise(expressions)}
    return False if False in verdicts else None if None in verdicts else True


def _agree(left: "Expression", right: "Expression") -> bool | None:
    if left.value is None or right.value is None:
        return False
    difference, place = abs(left.value - right.value), max(left.place, right.place)
    if difference == 0:
        return True
    if difference >= place:
        return False
    rounded = place < 1 and 2 * difference <= place
    return True if rounded or not (left.calculates or right.calculates) else None


def _holds_in_percent(chain: Sequence[_Side]) -> bool:
    """Whether percent is a unit here, as in 100 - 30 = 70%."""
    if not any("%" in side.tokens for side in chain):
        return False
    plain = [evaluate([token for token in side.tokens if token != "%"]) for side in chain]
    return _all_agree([expression for expression in plain if expression]) is not False


def _chains(text: str) -> Iterator[list[_Side]]:
    """Yield the longest runs of expressions with an equals sign between each two."""
    chain: list[_Side] = []
    for segment in _segments(text):
        if whole := _side(segment):
            chain.append(whole)
            continue
        if chain and (last := _side_at_start(segment)):
            chain.append(last)
        yield chain
        first = _side_at_end(segment)
        chain = [first] if first else []
    yield chain


def _segments(text: str) -> list[list[str]]:
    """The tokens between the equals signs."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    segments: list[list[str]] = [[]]
    for token in _TOKEN.findall(text):
        if token == "=":
            segments.append([])
        else:
            segments[-1].append(token)
    return segments


def _side(tokens: Sequence[str], *, clear: bool = True) -> _Side | None:
    expression = evaluate(tokens)
    if expression is None:
        return None
    return _Side(tokens, expression, clear and not _AMBIGUOUS.search(" ".join(tokens)))


def _side_at_start(segment: Sequence[str]) -> _Side | None:
    """The right side of an equation after which other text goes on; a bracket may open or close there."""
    run = list(takewhile(is_arithmetic, segment))
    depths = list(accumulate((token == "(") - (token == ")") for token in run))
    side = run[: depths.index(-1)] if -1 in depths else run
    while side and side[-1] == "(":
        side.pop()
    after = segment[len(side) : len(side) + 4]
    plain = not after or bool(_PLAIN.fullmatch(after[0]))
    return _side(side, clear=plain and not _UNCLEAR_AFTER.match(" ".join(after)))


def _side_at_end(segment: Sequence[str]) -> _Side | None:
    """The left side of an equation before which other text stands, or a bracket around all of it opens."""
    run = list(takewhile(is_arithmetic, reversed(segment)))
    opens = run[-1:] == ["("] and run.count("(") > run.count(")")
    side = (run[:-1] if opens else run)[::-1]
    before = segment[max(0, len(segment) - len(side) - 2) : len(segment) - len(side)]
    plain = not before or bool(_PLAIN.fullmatch(before[-1]))
    left = _side(side, clear=plain and not _UNCLEAR_BEFORE.search(" ".join([*before, *side[:1]])))
    # `Week 2 = 35 + 35` names what is calculated, and `apples - 5 = 3` begins before its minus.
    named = left and not left.expression.calculates
    cut = before and before[-1] not in ",;:.?(" and side[:1] == ["-"]
    return None if named or cut else left


# Arithmetic -----------------------------------------------------------------------------------------------------------
#
# Exact values of expressions of numbers, brackets, percent and + - * / ^. Nothing is handed to an interpreter, and
# every size is bounded: the expressions come from a policy, which may write anything, power towers included.

_NUMBER = re.compile(r"(?=\.?\d)(?!0\d)(?:\d{1,20}|\d{1,3}(?:,\d{3}){1,6})?(?:\.\d{1,20})?")
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3}
_OPERATIONS = {"+": add, "-": sub, "*": mul}
_SYMBOLS = frozenset([*_BINDING, "(", ")", "%"])
_END = ""
_MAX_TOKENS = 100
_MAX_POWER_BITS = 4096
_MAX_DECIMALS = 10
"""What a calculator prints beyond is its own rounding error: 0.5 - 0.4 = 0.09999999999999998."""


@dataclass(frozen=True)
class Expression:
    """The value of an expression."""

    value: Fraction | None
    """None where it divides by zero."""
    operands: tuple[Fraction, ...]
    """Its numbers, sorted and unsigned, without 0 and 1: calculating with those changes little."""
    place: Fraction
    """What one more in the last digit of a lone number would add, such as 1/100 for 3.14; 0 for a calculation."""

    @property
    def calculates(self) -> bool:
        """Whether it is more than a number."""
        return self.place == 0


def is_arithmetic(token: str) -> bool:
    """Return whether a token can be part of an expression; 007 and 3:45 are no numbers."""
    return token in _SYMBOLS or bool(_NUMBER.fullmatch(token))


def evaluate(tokens: Sequence[str]) -> Expression | None:
    """Return the value of all the tokens together; None where they are no expression, or one too large."""
    if len(tokens) > _MAX_TOKENS:
        return None
    reader = _Reader([*tokens, _END])
    try:
        value = reader.expression()
        reader.expect(_END)
    except _UnreadableError:
        return None
    operands = tuple(sorted(number for number in reader.numbers if number not in (0, 1)))
    return Expression(value, operands, Fraction(0) if reader.calculates else _place(tokens))


def _place(tokens: Sequence[str]) -> Fraction:
    decimals = sum(len(token.partition(".")[2]) for token in tokens)
    return Fraction(1, 10 ** (min(decimals, _MAX_DECIMALS) + 2 * tokens.count("%")))


class _UnreadableError(Exception):
    """The tokens are no expression, or one too large."""


class _Reader:
    """Operator-precedence parser; a value is None where it divides by zero."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.numbers: list[Fraction] = []
        self.calculates = False
        self._tokens = tokens
        self._position = 0

    def expression(self, binding: int = 0) -> Fraction | None:
        """Read an operand and all that operators tighter than `binding` join to it."""
        value = self._operand()
        while _BINDING.get(operator := self._tokens[self._position], 0) > binding:
            self._position += 1
            # Powers are taken from the right: 2^3^2 is 2^9.
            right = self.expression(_BINDING[operator] - (operator == "^"))
            self.calculates = True
            value = None if value is None or right is None else _calculate(operator, value, right)
        return value

    def expect(self, token: str) -> None:
        """Read this token."""
        if self._tokens[self._position] != token:
            raise _UnreadableError
        self._position += 1

    def _operand(self) -> Fraction | None:
        token = self._tokens[self._position]
        self._position += 1
        if token == "-":
            value = self.expression(_BINDING["*"])
            return None if value is None else -value
        if token == "(":
            value = self.expression()
            self.expect(")")
            return value
        return self._number(token)

    def _number(self, token: str) -> Fraction:
        if not _NUMBER.fullmatch(token):
            raise _UnreadableError
        number = Fraction(token.replace(",", ""))
        self.numbers.append(number)
        if self._tokens[self._position] != "%":
            return number
        self._position += 1
        return number / 100


def _calculate(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    if operator == "/":
        return left / right if right else None
    if operator == "^":
        return _power(left, right)
    value: Fraction = _OPERATIONS[operator](left, right)
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = base.numerator.bit_length() + base.denominator.bit_length()
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_POWER_BITS // bits:
        raise _UnreadableError
    return Fraction(base**exponent.numerator)
