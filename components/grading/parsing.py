r"""Parsing of answers: normalize the notation, and split lists, intervals, equations and the like into their parts."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

from components.grading.extract import find_boxes
from components.grading.quantities import Number, parse_number, parse_number_in_words
from components.grading.units import NO_CONTEXT, Context, Unit, split_unit, with_symbols_apart
from components.grading.vocabulary import FUNCTION_NAMES, STYLE, STYLED


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, parsed."""

    text: str
    """Canonical: answers with the same text are equal."""
    number: Number | None
    """The exact value of an integer, a decimal, a fraction, a mixed number or a number in words; otherwise None."""
    unit: Unit | None
    latex: str
    """The answer in normalized LaTeX, without delimiters around it and without its unit."""


class Kind(StrEnum):
    """Forms of an answer."""

    EXPRESSION = "expression"
    LIST = "list"
    r"""Values in any order: `1, 2`, `1 and 2`, `1 \pm 2`."""
    SET = "set"
    r"""`\{1, 2\}`: in any order, each counts once."""
    TUPLE = "tuple"
    """Values in order within brackets: a point, a vector, an interval."""
    UNION = "union"
    MATRIX = "matrix"
    """Rows, each a tuple."""
    EQUATION = "equation"
    INEQUALITY = "inequality"


@dataclass(frozen=True, slots=True)
class Structure:
    """The outermost level of an answer."""

    kind: Kind
    parts: tuple[str, ...]
    """The parts in LaTeX; an expression is its only part."""
    signs: tuple[str, ...] = ()
    """The two brackets of a tuple, or the relations between the parts of an equation or inequality."""


_INTEGER = re.compile(r"-?[0-9]{1,18}")
_STYLE = re.compile(STYLE + r"(?=\{)")
_SIGNS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2212\u2013\uff0d", "-")
    | dict.fromkeys("\u00b7\u22c5", r"\cdot ")
    | dict.fromkeys("\u00f7\u2044", "/")
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
    | {"\u00d7": r"\times ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm "}
    | {"\u222a": r"\cup ", "\u2208": r"\in ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2248": r"\approx "}
    | {"\u00b2": "^2", "\u00b3": "^3", "\u00b0": r"^\circ", "\u221a": r"\sqrt ", "\u2220": r"\angle "}
    | {"\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}"}
    | {"\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u211d": r"\mathbb{R}"}
)
_SYNONYMS = {
    **dict.fromkeys((r"\vert", r"\lvert", r"\rvert"), "|"),
    **{r"\lbrack": "[", r"\rbrack": "]", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\mathdollar": r"\$"},
    **{r"\lt": "<", r"\gt": ">", r"\varnothing": r"\emptyset "},
    **dict.fromkeys(("<=", r"\leq", r"\leqslant"), r"\le "),
    **dict.fromkeys((">=", r"\geq", r"\geqslant"), r"\ge "),
    **dict.fromkeys(("!=", r"\neq"), r"\ne "),
}
_SYNONYM = re.compile(r"(\\[a-z]+)(?![a-zA-Z])\s*|[<>!]=")
_PLAIN_VALUE = r"-?(?:[0-9]+(?:[./][0-9]+)?|\\frac\{[0-9]+\}\{[0-9]+\})"
_MONTHS = r"(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_AND_BELOW = rf"\s*(?:\\text\s*\{{\s*and\s*\}}|and|,)\s*\1\s*(<|\\le)\s*({_PLAIN_VALUE})"
_BASES = "two three four five six seven eight nine ten eleven twelve"
_END = "(?![a-zA-Z])"
_WITHOUT_MEANING = rf"\\!\s*|\\(?:left|right|[bB]igg?[lr]?){_END}\.?"
_ABOUT = r"^(?:\\text\s*\{\s*)?(?:\\approx|approximately|about|roughly|around)(?![a-zA-Z])(?:\s*\})?"
_ALL_REALS = r"(?i)^(?:\\text\s*\{)?all real(?: numbers|s)\}?$|^\\mathbb\{?\s*R\}?$"
_Rewrite = tuple[tuple[str, ...], re.Pattern[str], str]
"""Texts of which one must occur (a quick test), a pattern, and its replacement."""
_REWRITES: list[_Rewrite] = [
    (tuple(needed.split(" ")), re.compile(pattern), replacement)
    for needed, pattern, replacement in [
        # Different notation for the same thing.
        ("\\\\", rf"\\\\(?=(?:left|right|frac|sqrt|boxed|text|pi|cdot){_END})", r"\\"),  # escaped once too often
        ("\\\\", r"\\\\\s*\[-?[0-9.]+\s*(?:mm|cm|pt|em|ex|in)\]", r"\\\\ "),
        ("matrix", r"\\([pb]?matrix)\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"\\begin{\1}\2\\end{\1}"),
        (r"\! \left \right \b \B", _WITHOUT_MEANING, ""),
        ("US", r"US\s*\\?\$|^USD\s*(?=[0-9])", r"\\$"),
        ("color", r"\\(?:text)?color\s*\{[a-zA-Z]+\}\s*", ""),
        ("", rf"\\q?quad{_END}|(?<!\\)\\[,;:> ]|(?<!~)~(?!~)|\s", " "),
        ("frac binom", rf"\\(?:[dtc]|nice)(frac|binom){_END}", r"\\\1"),
        ("over", rf"\{{([^{{}}]*)\\over{_END}([^{{}}]*)\}}|^([^{{}}]*)\\over{_END}([^{{}}]*)$", r"\\frac{\1\3}{\2\4}"),
        (
            "choose",
            rf"\{{([^{{}}]*)\\choose{_END}([^{{}}]*)\}}|^([^{{}}]*)\\choose{_END}([^{{}}]*)$",
            r"\\binom{\1\3}{\2\4}",
        ),
        ("operatorname", rf"\\operatorname\s*\{{\s*(ln|{'|'.join(FUNCTION_NAMES)})\s*\}}", r"\\\1 "),
        ("{:} colon", rf"(?<=[0-9])(?:\{{:\}}|\s*\\colon{_END})\s*(?=[0-9])", ":"),
        (r"\}", r"\\\{\s*\\\}", r"\\emptyset "),
        (
            r"\circ \degree",
            rf"\\text\s*\{{\s*\^\s*\\circ\s*\}}|\^\s*(?:\{{\s*\\circ\s*\}}|\\circ{_END})|\\degrees?{_END}",
            r"\\degree ",
        ),
        ("o", r"(?<=[0-9])\s*\^\s*(?:\{\s*o\s*\}|o)$", r"\\degree "),
        (r"approx about roughly around", _ABOUT, ""),
        (r"\mathbb a A", _ALL_REALS, r"(-\\infty,\\infty)"),
        ("o O", rf"(?i)^(?:{STYLE}\{{)?\s*(?:there (?:is|are) )?no (?:real )?solutions?\.?\s*\}}?$", r"\\emptyset"),
        # Numbers: separators, bases, ratios.
        (",", r"(?<=[0-9])\s*\{\s*,\s*\}\s*(?=[0-9]{3})", ""),
        (",", r"\{,\}", ","),
        ("{.}", r"(?<=[0-9])\{\.\}(?=[0-9])", "."),
        ("[ ]", r"^\[([^\[\]()]*,[^\[\]()]*)\[$", r"[\1)"),
        ("[ ]", r"^\]([^\[\]()]*,[^\[\]()]*)\]$", r"(\1]"),
        # Statements and remarks around a value, which is compared.
        ("=", rf"^({_PLAIN_VALUE})\s*=\s*([a-zA-Z])$", r"\2=\1"),
        ("=", r"^(?:\\det\s*\(?\s*[A-Z]\s*\)?|\|\s*[A-Z]\s*\|)\s*=\s*(?=.)", ""),
        (r"\equiv", rf"^[0-9^{{}}+*()!\s-]+\\equiv\s*(-?[0-9]+)\s*\\p?mod{_END}.*$", r"\1"),
        ("text", r"\s*\\text\s*\{\s*,?\s*\(?\s*(?:only|since|because)\b.*$", ""),
        ("frac", r"(?<=[0-9])\s*\\frac\s*\{\s*(km|m|cm|mi|ft)\s*\}\s*\{\s*(h|s|min)\s*\}$", r"\\text{ \1/\2}"),
        ("{ N", r"(?<=[0-9])\s*\\(?:text|textrm|mathrm)\s*\{\s*N\s*\}$", r"\\text{ newton}"),
        ("{ J", r"(?<=[0-9])\s*\\(?:text|textrm|mathrm)\s*\{\s*J\s*\}$", r"\\text{ joule}"),
        ("%", r"(?<=%)\s*\\text\s*\{\s*of (?:the|all|his|her|its|their) [a-z ]+\}$", ""),
        ("t", r"(?i)^(\\text\s*\{\s*)it(?: is|'s) (?:an? )?([a-z]+)\.?\s*\}$", r"\1\2}"),
        (
            "es no",
            r"(?i)^(\\text\s*\{\s*)?(yes(?=, \w+ \w+\.?\s*\}?$)|no(?=, \w+ \w+(?: not|n't)\.?\s*\}?$)),.*?(\})?$",
            r"\1\2\3",
        ),
        ("st nd rd th", rf"\b({_MONTHS} [0-9]{{1,2}})(?:st|nd|rd|th)\b", r"\1"),
        ("and ,", rf"^([a-z])\s*>\s*({_PLAIN_VALUE}){_AND_BELOW}$", r"\2<\1\3\4"),
        ("and ,", rf"^([a-z])\s*\\ge\s*({_PLAIN_VALUE}){_AND_BELOW}$", r"\2\\le \1\3\4"),
        ("_", r"\(([0-9A-F]+)\)\s*_", r"\1_"),
        ("base", r"(?<=[0-9A-F])\s*(?:\\text\s*\{)?\s*(?:in )?base[\s-]*\}?\s*([0-9]+)\s*\}?", r"_\1"),
        *(
            ("_", rf"_\s*\{{?\s*(?:\\text\s*\{{)?\s*{word}\s*\}}{{0,2}}", f"_{base}")
            for base, word in enumerate(_BASES.split(), 2)
        ),
        ("to", r"(?<=[0-9])\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=[0-9])", ":"),
        ("{", rf"(?<![\^_}}a-z])(?:{STYLE})?\{{\s*([-+])\s*\}}", r"\1"),
        # Mathematics typed without LaTeX.
        ("**", r"\*\*(?=[0-9({])", "^"),
        ("*", r"(?<=[0-9a-zA-Z)}\s])\*(?=[\s0-9a-zA-Z(\\])", r"\\cdot "),
        ("pi", rf"(?<![a-zA-Z\\])pi{_END}", r"\\pi "),
        ("inf oo", rf"(?:\+\s*)?(?:(?<![a-zA-Z\\])(?:inf|infinity|oo)|\\infty){_END}", r"\\infty "),
    ]
]
_CANONICAL: list[_Rewrite] = [
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in [
        (("frac",), r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
        (("frac",), r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (("sqrt",), r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
        (("pmod",), r"\\pmod\s*([0-9a-zA-Z])", r"\\pmod{\1}"),
        (("_", "^"), r"([_^])\s*([0-9]+|[a-zA-Z])", r"\1{\2}"),
        # `1 1/2` is not `11/2`: a space between digits stays, all others go.
        (("",), r"(?<![0-9])\s+|\s+(?![0-9])", ""),
        (("(",), r"^\(([A-Z])\)$", r"\1"),
    ]
]
_EDGES = re.compile(r"^(?:\\[(\[,;:! ]|\*\*|\$|`|\s)+|(?:\\[)\],;:! ]|\*\*|(?<!\\)\$|[`.,;:]|\\\\|\\$|\s)+$")
_DOTS = re.compile(r"\.{2,}|\u2026")
_LISTED = re.compile(r",\s+[0-9]")  # `1, 234` are two numbers
_MAY_BE_LIST = re.compile(r"[,;]|and|or|\\pm")
_DOLLARS = re.compile(r"(?<!\\)\$")
_THOUSANDS = re.compile(r"(?<![\d.,(])\d{1,3}(?:,\d{3})+(?![\d,])")


def is_integer(written: str) -> bool:
    """Tell whether an answer is nothing but an integer, without separators and not too long."""
    return _INTEGER.fullmatch(written) is not None


@lru_cache(maxsize=8192)
def parse(written: str, context: Context = NO_CONTEXT) -> Answer:
    """Return an answer with its notation normalized; any text can be parsed.

    Only whole answers need the context, which decides what is a unit: their parts no longer have units.
    """
    if is_integer(written):
        return Answer(text=written, number=Number(Fraction(int(written)), None), unit=None, latex=written)
    latex = with_symbols_apart(_normalized(written), context.symbols)
    value, unit = split_unit(latex, context)
    if in_words := parse_number_in_words(unstyled(value)):
        digits = in_latex(in_words.value)
        return Answer(text=digits, number=in_words, unit=unit, latex=digits)
    # The unit at the end of a list belongs to its last member only.
    if _MAY_BE_LIST.search(latex) and parse_structure(latex).kind is Kind.LIST:
        unit = None
    else:
        latex = value
    text = _rewritten(unstyled(latex), _CANONICAL)
    number = None if "," in latex and _LISTED.search(latex) else parse_number(text)
    return Answer(text=text, number=number, unit=unit, latex=latex)


def in_latex(value: Fraction) -> str:
    r"""Return a number as an integer or a fraction, such as `-\frac{1}{2}`."""
    if value.denominator == 1:
        return str(value)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def unstyled(latex: str) -> str:
    r"""Return the text with commands such as `\text{}` replaced by their arguments."""
    while "\\" in latex and (plain := STYLED.sub(r"\1", latex)) != latex:
        latex = plain
    return latex


def _rewritten(text: str, rewrites: list[_Rewrite]) -> str:
    """The text after all rewrites, in their order."""
    for needed, pattern, replacement in rewrites:
        if any(part in text for part in needed):
            text = pattern.sub(replacement, text)
    return text


def _normalized(written: str) -> str:
    """The answer without delimiters and styles around it, and with one notation for each meaning."""
    text = _EDGES.sub("", _DOTS.sub(r"\\ldots ", written))
    boxes = find_boxes(text) if "box" in text else []
    if len(boxes) == 1 and (boxes[0].start, boxes[0].end) == (0, len(text)):
        text = boxes[0].content
    if not text.isascii():
        with_ascii_digits = "".join(str(unicodedata.decimal(each, each)) for each in text)
        text = _ROOT.sub(r"\\sqrt{\1}", with_ascii_digits).translate(_SIGNS)
    text = _in_symbols(_plain(text))
    text = _SYNONYM.sub(lambda match: _SYNONYMS.get(match[1] or match[0], match[0]), text)
    text = _unwrapped(_EDGES.sub("", _rewritten(text, _REWRITES)))
    text = _DOLLARS.sub(" ", text).strip()
    if text.startswith(("(", "[", r"\{")):  # `(1,234)` is a pair
        return text
    return _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


# Fonts and sizes have no meaning; commands for text stay, since their arguments may be words or units.
_DECLARATION = re.compile(
    r"\\(?:bf|rm|it|sf|tt|cal|bfseries|itshape|tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge"
    r"|displaystyle|textstyle|scriptstyle|limits|nonumber|notag|centering)(?![a-zA-Z])\s*"
)
_FONT = re.compile(r"\\(?:underline|uline|mathsf|mathtt|mathbf|mathit|boldsymbol|bm|pmb)(?![a-zA-Z])\s*(?=\{)")
_TEXT_DOLLAR = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*\\\$\s*\}")
_ENVIRONMENT = re.compile(
    r"\\begin\{(aligned|align\*?|gathered|gather\*?|split|equation\*?|displaymath|center)\}(.*)\\end\{\1\}", re.DOTALL
)
_ALIGNMENT = re.compile(r"(?<!\\)&")
_LINE_END = re.compile(r"(?:\s*\\\\\s*)+(?=\s*$)|\\\\(?=\s*&?\s*(?:[=<>]|\\(?:le|ge|approx)(?![a-zA-Z])))")
_SAYS_ANSWER = r"(?:the )?(?:final )?(?:answer|ans|result|solution|total)\s*(?:is:|is|:|=)"
_LEAD = re.compile(
    r"(?:=|\\(?:therefore|Rightarrow|implies|Longrightarrow|rightarrow|longrightarrow|qquad|quad)(?![a-zA-Z])"
    rf"|\\(?:text|textbf|mathrm|mbox)\s*\{{\s*(?:so|thus|hence|therefore|{_SAYS_ANSWER})[,:]?\s*\}}\s*:?|{_SAYS_ANSWER})\s*",
    re.IGNORECASE,
)
_TRAIL = re.compile(r"(?:\s|\\ |~)*\\(?:checkmark|blacksquare|Box|qed|qedhere)(?![a-zA-Z])\s*$")
_ROOT = re.compile("\u221a\\s*([0-9]+(?:\\.[0-9]+)?)")


def _plain(text: str) -> str:
    """The text without fonts, sizes, line breaks, and words and marks such as "Answer:" and a check mark."""
    if "\\" in text:
        text = _TEXT_DOLLAR.sub(r"\\$", _FONT.sub(" ", _DECLARATION.sub(" ", text)))
        if environment := _ENVIRONMENT.fullmatch(text.strip()):
            text = _ALIGNMENT.sub(" ", _LINE_END.sub(" ", environment[2]))
        text = _TRAIL.sub("", text)
    while lead := _LEAD.match(text := text.strip()):
        text = text[lead.end() :]
    return text


def _unwrapped(text: str) -> str:
    """The text without a style command or braces around all of it."""
    while True:
        if styled := STYLED.fullmatch(text):
            text = styled[1]
        elif text.startswith("{") and _closing(text) == len(text) and not _AND.search(text):
            text = text[1:-1]
        elif (style := _STYLE.match(text)) and _closing(text[style.end() :]) == len(text) - style.end():
            text = text[style.end() + 1 : -1]
        else:
            return text
        text = _EDGES.sub("", text)


_SUBJECT = (
    r"(?:(?:all )?(?:the )?(?:real numbers|reals|real values|values)(?: of)? ?)?(?:(?P<name>[a-zA-Z]) )?"
    r"(?:(?:that |which )?(?:is|are|lies?) )?"
)
_BETWEEN = re.compile(
    _SUBJECT + r"(?P<strictly>strictly )?(?:between|from) (?P<low>[^\s,]+) (?:and|to) (?P<high>[^\s,]+)"
    r"(?:,? (?P<ends>inclusive|exclusive))?",
    re.IGNORECASE,
)
_RELATIONS_IN_WORDS = {
    r"\ge": "greater than or equal to|larger than or equal to|at least|no less than|not less than",
    r"\le": "less than or equal to|smaller than or equal to|at most|no more than|not more than|no greater than",
    ">": "greater than|larger than|more than|strictly greater than|above",
    "<": "less than|smaller than|fewer than|strictly less than|below",
}
_COMPARED = [
    (re.compile(rf"{_SUBJECT}(?:{words}) (?P<bound>[^\s,]+)", re.IGNORECASE), sign)
    for sign, words in _RELATIONS_IN_WORDS.items()
]
_BOUND = re.compile(r"(?=.*(?:[0-9]|\\pi|\\infty))(?:[0-9.+\-*/^{}()]|\\(?:d?frac|sqrt|pi|infty)(?![a-z]))+")
_MAY_COMPARE = re.compile("between|clusive|than|at least|at most|above|below", re.IGNORECASE)
_MAX_WORDS_CHARACTERS = 120


def _in_symbols(text: str) -> str:
    """The interval or inequality that an answer describes in words; any other text unchanged.

    "Between 2 and 5" is ambiguous about its ends, so it needs "strictly", "inclusive" or "exclusive".
    """
    if len(text) > _MAX_WORDS_CHARACTERS or not _MAY_COMPARE.search(text):
        return text
    plain = " ".join(_DOLLARS.sub("", unstyled(text)).split())
    if match := _BETWEEN.fullmatch(plain):
        is_strict, ends = match["strictly"] is not None, (match["ends"] or "").lower()
        is_open = is_strict or ends == "exclusive"
        says_ends_once = is_strict != bool(ends)
        if not says_ends_once or not _BOUND.fullmatch(match["low"]) or not _BOUND.fullmatch(match["high"]):
            return text
        if match["name"]:
            sign = "<" if is_open else r"\le"
            return f"{match['low']} {sign} {match['name']} {sign} {match['high']}"
        return f"({match['low']},{match['high']})" if is_open else f"[{match['low']},{match['high']}]"
    for pattern, sign in _COMPARED:
        if (match := pattern.fullmatch(plain)) and _BOUND.fullmatch(match["bound"]):
            return f"{match['name'] or 'x'} {sign} {match['bound']}"
    return text


_OPEN, _CLOSE = (
    ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"),
    (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"),
)
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[^\\]", re.DOTALL)
_AND = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\{])(?:and|or)(?![a-z}])"
    r"|\\(?:land|lor|vee|wedge)(?![a-zA-Z])"
)
_AND_TOKEN = "\x01"
_SEPARATORS = (_AND_TOKEN, ",", ";", "and", "or", r"\vee", r"\wedge")
_RELATION = {"<": "<", ">": ">", "=": "=", r"\le": "<=", r"\ge": ">=", r"\ne": "!="}
_RELATION |= {r"\approx": "~", r"\in": "in", r"\equiv": "=="}
_GRID = r"\{(?:[pb]matrix|matrix|array|smallmatrix)\}"
_MATRIX = re.compile(rf"(?:[\[(]\s*)?\\begin{_GRID}(?:\s*\{{[clr|\s]*\}})?(.*?)\\end{_GRID}(?:\s*[\])])?", re.DOTALL)
_NESTED = re.compile(r"\[\s*\[([^()\[\]{}]+(?:\]\s*,\s*\[[^()\[\]{}]+)+)\]\s*\]")
_ROW_END = re.compile(r"\]\s*,\s*\[")
_PLUS_MINUS, _MINUS_PLUS = re.compile(rf"\\pm{_END}"), re.compile(rf"\\mp{_END}")
_SUCH_THAT = re.compile(
    r"\s*[a-zA-Z]\s*(?:\\in\s*(?:\\mathbb\{R\}|\\mathbb R|\\R)\s*)?(?:\\mid|\\vert|[|:])(.+)", re.DOTALL
)
_OPERATION = re.compile(
    r"\\(?:star|diamond|oplus|otimes|ominus|odot|spadesuit|heartsuit|clubsuit|bullet|dagger|#)|[@#\u2605\u2606]"
)
_FUNCTION_OF = (
    r"\\(?:sqrt|pi|infty|frac|binom|lfloor|lceil|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|gcd|lcm|max|min|det)"
    r"|\\operatorname|(?<![a-zA-Z])(?:log|ln|exp|sin|cos|tan|gcd|lcm)(?![a-zA-Z])|\|\s*[a-zA-Z]\s*\|"
)
_NAME = re.compile(
    rf"(?!.*(?:{_FUNCTION_OF}))"
    r"[^0-9+\-*/^<>]*[a-zA-Z][^+\-*/^<>]*(?:\^(?:\\prime|\{\\prime\}|\{-1\})\s*(?:\([^()]*\))?)?"
)


@lru_cache(maxsize=8192)
def parse_structure(latex: str) -> Structure:
    """Return the outermost level of an answer written in LaTeX."""
    latex = latex.strip()
    while latex.startswith("{") and _closing(latex) == len(latex):
        latex = latex[1:-1].strip()
    for parse_kind in (_matrix, _set, _list, _relation, _union, _tuple, _plus_minus):
        if structure := parse_kind(latex):
            return structure
    return Structure(Kind.EXPRESSION, (latex,))


def is_name(latex: str) -> bool:
    r"""Tell whether a text is a name, not a value: `x`, `f(x)`, `(x, y)`, `\angle A`, `5 \star 1`."""
    name = latex.strip()
    return name not in {"e", "i"} and bool(_NAME.fullmatch(name) or _OPERATION.search(name))


def exact_parts(equation: Structure) -> tuple[str, ...]:
    r"""Return the parts before an approximation, x and 1/3 for `x = 1/3 \approx 0.33`; both parts of `x \approx 11`."""
    start = 1 if is_name(equation.parts[0]) else 0
    if "~" not in equation.signs[start:]:
        return equation.parts
    return equation.parts[: equation.signs.index("~", start) + 1]


def _matrix(latex: str) -> Structure | None:
    """The rows of an environment such as `pmatrix` or of `[[1,2],[3,4]]`, with `&` between their elements."""
    if latex[:1] != "[" and r"\begin" not in latex:
        return None
    if nested := _NESTED.fullmatch(latex):
        return Structure(Kind.MATRIX, tuple(row.strip().replace(",", "&") for row in _ROW_END.split(nested[1])))
    match = _MATRIX.fullmatch(latex)
    if not match or r"\begin" in match[1]:
        return None
    rows = [row.strip() for row in re.split(r"\\\\|\\cr(?![a-zA-Z])|\\hline", match[1]) if row.strip()]
    return Structure(Kind.MATRIX, tuple(rows)) if rows else None


def _set(latex: str) -> Structure | None:
    r"""The members of a set in braces; `\{x : x > 1\}` is read as its condition."""
    if latex[:2] != r"\{" or _closing(latex) != len(latex):
        return None
    if condition := _SUCH_THAT.fullmatch(latex[2:-2]):
        return parse_structure(condition[1])
    return Structure(Kind.SET, tuple(_items(latex[2:-2])))


def _list(latex: str) -> Structure | None:
    """The values between commas, semicolons, "and" and "or", if there are several."""
    if not any(separator in latex for separator in _SEPARATORS):
        return None
    items = _items(latex)
    return Structure(Kind.LIST, tuple(items)) if len(items) > 1 else None


def _items(latex: str) -> list[str]:
    """The members of a list, which are separated by semicolons, or by commas and "and"."""
    groups = [part for part in _split(latex, ";") if part]
    if len(groups) > 1:
        return groups
    clauses = [part.strip(" ,") for part in _split(_AND.sub(_AND_TOKEN, latex), _AND_TOKEN) if part.strip(" ,")]
    sizes = {len(_split(part, ",")) for part in clauses}
    # "x = 1, y = 2 and x = 3, y = 4" has two members, each with two equations.
    if len(clauses) > 1 and len(sizes) == 1 and sizes != {1} and "=" in latex:
        return clauses
    return [item for part in clauses for item in _split(part, ",") if item]


def _union(latex: str) -> Structure | None:
    parts = _split(latex, r"\cup")
    return Structure(Kind.UNION, tuple(parts)) if len(parts) > 1 else None


def _tuple(latex: str) -> Structure | None:
    """The parts of a tuple or interval; if brackets contain only one part, they are dropped."""
    opening = next((sign for sign in ("(", "[", r"\langle") if latex.startswith(sign)), "")
    closing = next((sign for sign in (")", "]", r"\rangle") if latex.endswith(sign)), "")
    if not opening or not closing or _closing(latex) != len(latex):
        return None
    inner = latex[len(opening) : -len(closing)]
    parts = [part for part in _split(inner, ";") if part]
    if len(parts) < 2:
        parts = _split(inner, ",")
    if len(parts) < 2:
        return parse_structure(inner) if (opening, closing) in {("(", ")"), ("[", "]")} else None
    return Structure(Kind.TUPLE, tuple(parts), (opening.replace(r"\langle", "("), closing.replace(r"\rangle", ")")))


def _relation(latex: str) -> Structure | None:
    """The sides of an equation or inequality, and the signs between them."""
    if not any(sign in latex for sign in _RELATION):
        return None
    signs = tuple(_RELATION[token] for token, depth in _tokens(latex) if depth == 0 and token in _RELATION)
    if not signs:
        return None
    kind = Kind.EQUATION if set(signs) <= {"=", "~", "in", "=="} else Kind.INEQUALITY
    return Structure(kind, tuple(_split(latex, *_RELATION)), signs)


def _plus_minus(latex: str) -> Structure | None:
    r"""`a \pm b` is the list of `a + b` and `a - b`; all its `\pm` have the same sign."""
    if not _PLUS_MINUS.search(latex) and not _MINUS_PLUS.search(latex):
        return None
    both = (_PLUS_MINUS.sub(upper, _MINUS_PLUS.sub(lower, latex)) for upper, lower in (("+", "-"), ("-", "+")))
    return Structure(Kind.LIST, tuple(each.strip().removeprefix("+") for each in both))


def _split(latex: str, *separators: str) -> list[str]:
    """The parts between separators outside of brackets."""
    if not any(separator in latex for separator in separators) and not latex.endswith("\\"):
        return [latex.strip()]  # which is all for most texts, and quicker
    parts = [""]
    for token, depth in _tokens(latex):
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _closing(latex: str) -> int:
    """The position after the bracket that closes the first one; -1 if it is never closed."""
    position = 0
    for token, depth in _tokens(latex):
        position += len(token)
        if depth == 0 and token in _CLOSE:
            return position
    return -1


def _tokens(latex: str) -> Iterator[tuple[str, int]]:
    """Each command and character with its depth in brackets; a bracket has the depth of the text around it."""
    depth = 0
    for match in _TOKEN.finditer(latex):
        token = match.group()
        if token in _CLOSE:
            depth -= 1
        yield token, depth
        if token in _OPEN:
            depth += 1
