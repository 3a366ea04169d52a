r"""Process supervision (arXiv 2402.03300, section 4.1.3): the steps of a completion, and whether each is right.

A step is a worked line: one that states an equation which can be checked and was not stated before. The text between
two such lines belongs to the later one. The last step ends with the completion and is worth what its answer is worth.

Checked arithmetic says that a line is true, not that it helps. Trivial and repeated equations are no steps, but a
policy can still state new ones that nobody asked for; and since advantages are sums over the steps to come, of two
completions the one with more right steps is preferred. Watch the number of steps when training on this.

Three parts, each called by the one above it: steps of a completion, equations of a line, values of expressions.
"""

import ast
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    """Sampled tokens of the completion up to and including the step's last one."""
    reward: float
    """1 for right, 0 for wrong, NaN for one that cannot be scored."""


def worked_steps(text: str, stated: "set[Equation] | None" = None) -> list[tuple[int, bool]]:
    """Return the end of each worked line above the one with the last `####` or box, and whether it is right.

    Ends are in characters, up to and including the newline, whose token completes the line's last number. A line is
    right if every equation that it adds holds. One without a newline is no step: it is the answer, or was cut off.
    What was `stated` before adds nothing, and what is stated here is added to it.
    """
    stated = set() if stated is None else stated
    answer = max(text.rfind(marker) for marker in _ANSWER_MARKERS)
    reasoning = text if answer < 0 else text[:answer]
    steps: list[tuple[int, bool]] = []
    end = 0
    for line in reasoning.split("\n")[:-1]:
        end += len(line) + 1
        added = set(equations(line)) - stated
        if added:
            steps.append((end, all(equation.holds for equation in added)))
            stated |= added
    return steps


def outcome(grade: Grade) -> float:
    """Return what the final answer is worth."""
    return _OUTCOMES[grade.verdict]


def verified_steps(completion: "Completion", grade: Grade, decode: Callable[[Sequence[int]], str]) -> list[Step]:
    """Return the steps of a completion, whose ends increase strictly.

    `decode` turns the first tokens of a turn into the beginning of its text. A step's last token is the first with
    which all of its characters are there. Of steps that would end at the same token one remains: it is right if all
    are, and where the completion itself ends it is the answer. What an environment wrote has no steps, and repeating
    it makes none.
    """
    ids = completion.tokens.sampled_ids
    turns = [(turn.end, turn.text, turn.observation) for turn in completion.turns]
    stated: set[Equation] = set()
    rewards: dict[int, float] = {}
    start = 0
    for stop, text, observation in turns or [(len(ids), completion.text, "")]:
        for end, right in _token_ends(ids[start:stop], worked_steps(text, stated), decode):
            rewards[start + end] = min(rewards.get(start + end, 1.0), float(right))
        stated.update(*map(equations, observation.split("\n")))
        start = stop
    rewards[len(ids)] = outcome(grade)
    return [Step(end, reward) for end, reward in rewards.items()]


def _token_ends(
    ids: Sequence[int], steps: Sequence[tuple[int, bool]], decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[int, bool]]:
    """Yield steps with their ends in tokens in place of characters."""

    def num_decoded(count: int) -> int:
        return len(decode(ids[:count]).rstrip(_INCOMPLETE))

    end = 0
    for num_characters, right in steps:
        end = bisect_left(range(len(ids) + 1), num_characters, end, len(ids), key=num_decoded)
        yield end, right


def turn_steps(completion: "Completion", grade: Grade) -> list[Step]:
    """Return a step for each turn of a completion, of which the last is worth what its answer is worth."""
    ends = [turn.end for turn in completion.turns[:-1]]
    return [*(Step(end, math.nan) for end in ends), Step(completion.num_tokens, outcome(grade))]


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
    for mark in _MARK.finditer(line):
        result = _RESULT.match(line, mark.end())
        # A loss may be written behind its mark as `80 less`.
        clear += _chains(f"{mark[1]}={result[1]}" if result and "=-" not in mark[1] else mark[1])
    return [equation for chain in clear if (equation := _equation(chain))]


def _chains(text: str) -> Iterator[list["Expression"]]:
    """Yield the longest runs of expressions with an equals sign between each two."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    segments: list[list[str]] = [[]]
    for token in _TOKEN.findall(text):
        if token == "=":
            segments.append([])
        else:
            segments[-1].append(token)
    chain: list[Expression] = []
    for segment in segments:
        if whole := evaluate(segment):
            chain.append(whole)
            continue
        if chain and (last := _side_at_start(segment)):
            chain.append(last)
        yield chain
        first = _side_at_end(segment)
        chain = [first] if first else []
    yield chain


def _side_at_start(segment: Sequence[str]) -> "Expression | None":
    """Return the right side of an equation after which other text goes on; a bracket may open or close there."""
    run = list(takewhile(is_arithmetic, segment))
    depths = list(accumulate((token == "(") - (token == ")") for token in run))
    side = run[: depths.index(-1)] if -1 in depths else run
    while side and side[-1] == "(":
        side.pop()
    after = segment[len(side) : len(side) + 4]
    plain = not after or bool(_PLAIN.fullmatch(after[0]))
    right = evaluate(side)
    return right and replace(right, clear=right.clear and plain and not _UNCLEAR_AFTER.match(" ".join(after)))


def _side_at_end(segment: Sequence[str]) -> "Expression | None":
    """Return the left side of an equation before which other text stands, or a bracket around all of it opens."""
    run = list(takewhile(is_arithmetic, reversed(segment)))
    opens = run[-1:] == ["("] and run.count("(") > run.count(")")
    side = (run[:-1] if opens else run)[::-1]
    before = segment[max(0, len(segment) - len(side) - 2) : len(segment) - len(side)]
    plain = not before or bool(_PLAIN.fullmatch(before[-1]))
    left = evaluate(side)
    # `Week 2 = 35 + 35` names what is calculated, and `apples - 5 = 3` begins before its minus.
    cut = before and before[-1] not in ",;:.?(" and side[:1] == ["-"]
    if left is None or cut or not left.calculates:
        return None
    clear = plain and not _UNCLEAR_BEFORE.search(" ".join([*before, *side[:1]]))
    return replace(left, clear=left.clear and clear)


def _equation(chain: Sequence["Expression"]) -> Equation | None:
    """Return the equation of a chain of sides; None where it calculates nothing or depends on how it is read."""
    holds = _all_agree(chain)
    trivial = holds and len({side.operands for side in chain}) == 1
    if holds is None or trivial or not any(side.calculates for side in chain):
        return None
    if not holds and any("%" in side.tokens for side in chain):
        # Percent may be a unit, as in 100 - 30 = 70%.
        without = [evaluate([token for token in side.tokens if token != "%"]) for side in chain]
        if _all_agree([side for side in without if side]) is not False:
            return None
    return Equation(frozenset((side.operands, side.value) for side in chain), holds)


def _all_agree(chain: Sequence["Expression"]) -> bool | None:
    """Return whether each side is equal to the next one; None where that depends on how they were rounded."""
    unclear = False
    for left, right in pairwise(chain):
        if left.value is None or right.value is None:
            return False
        difference, place = abs(left.value - right.value), max(left.place, right.place)
        if difference and difference >= place:
            return False
        rounded = not difference or (place < 1 and 2 * difference <= place)
        unclear |= not rounded and (left.calculates or right.calculates)
    return None if unclear else True


# Arithmetic -----------------------------------------------------------------------------------------------------------
#
# Exact values of expressions of numbers, brackets, percent and + - * / ^, which have Python's own grammar. Python only
# parses them, and every size is bounded: they come from a policy, which may write anything, power towers included.

_NUMBER = re.compile(r"(?=\.?\d)(?!0\d)(?:\d{1,20}|\d{1,3}(?:,\d{3}){1,6})?(?:\.\d{1,20})?")
_SYMBOLS = frozenset("+-*/^()%")
_OPERATIONS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
_MAX_TOKENS = 100
_MAX_POWER_BITS = 4096
_MAX_DECIMALS = 10
"""What a calculator prints beyond is its own rounding error: 0.5 - 0.4 = 0.09999999999999998."""


@dataclass(frozen=True)
class Expression:
    """The value of an expression, such as one side of an equation."""

    tokens: Sequence[str]
    value: Fraction | None
    """None where it divides by zero."""
    operands: tuple[Fraction, ...]
    """Its numbers, sorted and unsigned, without 0 and 1: calculating with those changes little."""
    place: Fraction
    """What one more in the last digit of a lone number would add, such as 1/100 for 3.14; 0 for a calculation."""
    clear: bool
    """Whether nothing in it or beside it gives it another meaning."""

    @property
    def calculates(self) -> bool:
        """Whether it is more than a number."""
        return self.place == 0


def is_arithmetic(token: str) -> bool:
    """Return whether a token can be part of an expression; 007 and 3:45 are no numbers."""
    return token in _SYMBOLS or bool(_NUMBER.fullmatch(token))


def evaluate(tokens: Sequence[str]) -> Expression | None:
    """Return the value of all the tokens together; None where they are no expression, or one too large."""
    if len(tokens) > _MAX_TOKENS or not all(map(is_arithmetic, tokens)):
        return None
    numbers: list[Fraction] = []
    source: list[str] = []
    for before, token in pairwise(["(", *tokens]):
        if token not in _SYMBOLS:
            source.append(str(len(numbers)))  # its index: Python would read it as a float
            numbers.append(Fraction(token.replace(",", "")))
        elif token == "%" and before not in _SYMBOLS:
            numbers[-1] /= 100
        else:
            source.append("**" if token == "^" else token)
    try:
        tree = ast.parse(" ".join(source), mode="eval")
        value = _value(tree.body, numbers)
    except (SyntaxError, ValueError, KeyError):
        return None
    place = Fraction(0)
    if not any(isinstance(node, ast.BinOp) for node in ast.walk(tree)):
        num_decimals = sum(len(token.partition(".")[2]) for token in tokens)
        place = Fraction(1, 10 ** (min(num_decimals, _MAX_DECIMALS) + 2 * tokens.count("%")))
    operands = tuple(sorted(number for number in numbers if number not in (0, 1)))
    return Expression(tokens, value, operands, place, clear=not _AMBIGUOUS.search(" ".join(tokens)))


def _value(node: ast.expr, numbers: Sequence[Fraction]) -> Fraction | None:
    """Return the value of a node, None where it divides by zero; ValueError where it is no arithmetic or too large."""
    match node:
        case ast.Constant(value=int(index)):
            return numbers[index]
        case ast.UnaryOp(op=ast.USub()):
            value = _value(node.operand, numbers)
            return None if value is None else -value
        case ast.BinOp():
            left, right = _value(node.left, numbers), _value(node.right, numbers)
            return None if left is None or right is None else _calculate(left, node.op, right)
    raise ValueError


def _calculate(left: Fraction, operator: ast.operator, right: Fraction) -> Fraction | None:
    if isinstance(operator, ast.Div):
        return left / right if right else None
    if isinstance(operator, ast.Pow):
        num_bits = left.numerator.bit_length() + left.denominator.bit_length()
        if right.denominator != 1 or not 0 <= right <= _MAX_POWER_BITS // num_bits:
            raise ValueError
        return Fraction(left**right.numerator)
    value: Fraction = _OPERATIONS[type(operator)](left, right)
    return value
