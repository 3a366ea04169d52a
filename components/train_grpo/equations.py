r"""The equations that a line of running text states between numbers, and whether they hold.

A line means more than its numbers say: it has units, remainders, unknowns, words that calculate. What cannot be read
for certain is therefore no equation, and one that does not hold is wrong only where nothing beside it could be why.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, takewhile

from components.train_grpo.arithmetic import Expression, evaluate, is_arithmetic


@dataclass(frozen=True)
class Equation:
    """Two or more expressions that a line calls equal."""

    numbers: tuple[Fraction, ...]
    """The operands of its sides: the same for 3+5=8, 8=5+3+0 and 8-5=3, which are one fact said three times."""
    holds: bool


_MARK = re.compile(r"<<([^<>]*)>>")
_RESULT = re.compile(r" ?\$? ?((?:\d++(?:,\d++)*+(?:\.\d++)?+|\.\d++))(?![\d/:%]| \d)")
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
_TOKEN = re.compile(r"(?:\d++(?:[.,:]\d++)*+|\.\d++)\w*+|\w+\(?|\\[A-Za-z]+|\.{2,}|[<>!:=~]=|=[=<>~]|\S")

_PLAIN = re.compile(r"[A-Za-z]{2,}\(?|[,;:.?()\"']")
_CALCULATING_WORDS = re.compile(
    r"(?:plus|minus|times|over|by|of|divided|multiplied|squared|cubed|half|double|twice|triple|percent|not|mod"
    r"|hundred|thousand|million|billion|trillion|dozens?|cents?)\b",
    re.IGNORECASE,
)
_GOES_BEFORE = re.compile(r"\d (?:and|,)$")
"""1 and 1/4; 14, 400."""
_GOES_ON = re.compile(r"[a-z]+ (?:and )?\d+ [a-z]|and \(? ?\d+ /|, \d{3}(?!\d)|\. \\", re.IGNORECASE)
r"""1 hour 30 minutes; 16 and 2/3; 14, 400; 0.\overline{3}."""
_REMAINDERS = re.compile(r"mod(?:ulo)?(?![a-z])|remainder|\u2261|\\equiv", re.IGNORECASE)
_AMBIGUOUS = re.compile(r"/ \S+ /|[-+].*%")
"""25 / 1/3 may mean 75, and 80 - 20% may mean 64."""


def equations(line: str) -> list[Equation]:
    """Return what a line states; each mark of a calculator, such as `<<48/2=24>>24`, is an equation of its own.

    A mark's result and the number written behind it have to agree. A number with decimals equals what rounds to it, a
    whole number only itself; where it may have been cut or rounded to a whole one, nothing is said. A quotient by zero
    equals nothing. What needs no calculation (5 = 5, 5 + 0 = 5, 2 * 3 = 3 * 2) is no equation here. Takes time in
    proportion to the length of the line.
    """
    clear = not _REMAINDERS.search(line)
    texts = [_MARK.sub(" ", line), *(_calculation(line, mark) for mark in _MARK.finditer(line))]
    found = [_judged(chain, clear) for text in texts for chain in _chains(text)]
    return [equation for equation in found if equation]


def _calculation(line: str, mark: re.Match[str]) -> str:
    """What a mark states, with the number written behind it; a loss may be written there as `80 less`."""
    result = _RESULT.match(line, mark.end())
    return f"{mark[1]}={result[1]}" if result and "=-" not in mark[1] else mark[1]


@dataclass(frozen=True)
class _Side:
    """An expression that stands on one side of an equals sign."""

    tokens: Sequence[str]
    expression: Expression
    clear: bool
    """Whether nothing in it or beside it gives it another meaning."""


def _judged(chain: Sequence[_Side], clear: bool) -> Equation | None:
    """The equation that a chain of sides makes; None where it says nothing, or nothing clear."""
    expressions = [side.expression for side in chain]
    if not any(expression.calculates for expression in expressions):
        return None
    distinct = {expression.operands for expression in expressions}
    numbers = tuple(sorted(number for operands in distinct for number in operands))
    holds = _all_agree(expressions)
    if holds:
        return Equation(numbers, holds=True) if len(distinct) > 1 else None
    if holds is None or not clear or not all(side.clear for side in chain) or _holds_in_percent(chain):
        return None
    return Equation(numbers, holds=False)


def _all_agree(expressions: Sequence[Expression]) -> bool | None:
    """Whether each is equal to the next one; None where that depends on how they were rounded."""
    verdicts = {_agree(left, right) for left, right in pairwise(expressions)}
    return False if False in verdicts else None if None in verdicts else True


def _agree(left: Expression, right: Expression) -> bool | None:
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
    """The right side of an equation after which other text goes on; a bracket may open or close behind it."""
    run = list(takewhile(is_arithmetic, segment))
    depths = list(accumulate((token == "(") - (token == ")") for token in run))
    side = run[: depths.index(-1)] if -1 in depths else run
    while side and side[-1] == "(":
        side.pop()
    after = segment[len(side) : len(side) + 4]
    clear = not after or (_is_plain(after[0]) and not _GOES_ON.match(" ".join(after)))
    return _side(side, clear=clear)


def _side_at_end(segment: Sequence[str]) -> _Side | None:
    """The left side of an equation before which other text stands; a bracket may open before it."""
    run = list(takewhile(is_arithmetic, reversed(segment)))
    depths = list(accumulate((token == ")") - (token == "(") for token in run))
    side = (run[: depths.index(-1)] if -1 in depths else run)[::-1]
    before = segment[max(0, len(segment) - len(side) - 2) : len(segment) - len(side)]
    clear = not before or (_is_plain(before[-1]) and not _GOES_BEFORE.search(" ".join(before)))
    found = _side(side, clear=clear)
    # `Week 2 = 35 + 35` names what is calculated, and `apples - 5 = 3` begins before its minus.
    named = found and not found.expression.calculates
    cut = before and before[-1] not in ",;:.?(" and side[:1] == ["-"]
    return None if named or cut else found


def _is_plain(token: str) -> bool:
    return bool(_PLAIN.fullmatch(token)) and not _CALCULATING_WORDS.match(token)
