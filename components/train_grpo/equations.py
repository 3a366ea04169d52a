r"""The equations that a line of running text states between numbers, and whether they hold.

A line means more than its numbers say: it has units, remainders, unknowns, words that calculate. An equation that
cannot be read for certain is therefore left out, and so is one whose neighbours could give it another meaning, even
where it holds: a policy that is rewarded for what holds would learn to write what cannot be called wrong.
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

    sides: frozenset[tuple[tuple[Fraction, ...], Fraction | None]]
    """The operands of each and what they come to: the same for 3+5=8, 8=5+3 and 3*1+5+0=8.0, one fact said thrice."""
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
    """Return what a line states; each mark of a calculator, such as `<<48/2=24>>24`, is an equation of its own.

    A mark's result and the number written behind it have to agree. A number with decimals equals what rounds to it, a
    whole number only itself; where it may have been cut or rounded to a whole one, nothing is said. A quotient by zero
    equals nothing. What needs no calculation (5 = 5, 5 + 0 = 5, 2 * 3 = 3 * 2) is no equation here. Takes time in
    proportion to the length of the line.
    """
    bare = [] if _REMAINDERS.search(line) else list(_chains(_MARK.sub(" ", line)))
    clear = [chain for chain in bare if all(side.clear for side in chain)]
    marked = [chain for mark in _MARK.finditer(line) for chain in _chains(_calculation(line, mark))]
    return [equation for chain in [*clear, *marked] if (equation := _judged(chain))]


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


def _judged(chain: Sequence[_Side]) -> Equation | None:
    """The equation that a chain of sides makes; None where it calculates nothing or depends on how it is read."""
    expressions = [side.expression for side in chain]
    holds = _all_agree(expressions)
    trivial = holds and len({expression.operands for expression in expressions}) == 1
    if holds is None or trivial or not any(expression.calculates for expression in expressions):
        return None
    if not holds and _holds_in_percent(chain):
        return None
    return Equation(frozenset((expression.operands, expression.value) for expression in expressions), holds)


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
    found = _side(side, clear=plain and not _UNCLEAR_BEFORE.search(" ".join([*before, *side[:1]])))
    # `Week 2 = 35 + 35` names what is calculated, and `apples - 5 = 3` begins before its minus.
    named = found and not found.expression.calculates
    cut = before and before[-1] not in ",;:.?(" and side[:1] == ["-"]
    return None if named or cut else found
