r"""What an answer is made of: lists, tuples, intervals, matrices, equations and inequalities, down to expressions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Forms of an answer."""

    EXPRESSION = "expression"
    LIST = "list"
    """Values in no order: `1, 2`, `1 and 2`, `1 \\pm 2`."""
    SET = "set"
    r"""`\{1, 2\}`: in no order, each counts once."""
    TUPLE = "tuple"
    """Values in order within brackets: a point, a vector, an interval."""
    UNION = "union"
    MATRIX = "matrix"
    """Rows, each a tuple."""
    EQUATION = "equation"
    INEQUALITY = "inequality"


@dataclass(frozen=True, slots=True)
class Structure:
    """One level of an answer."""

    kind: Kind
    parts: tuple[str, ...]
    """The parts as they are written; an expression has one."""
    signs: tuple[str, ...] = ()
    """The two brackets of a tuple, or the relations between the parts of an equation or inequality."""


_OPEN, _CLOSE = (
    ("(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"),
    (")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"),
)
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[^\\]", re.DOTALL)
_AND = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\{])(?:and|or)(?![a-z}])|\\(?:land|lor|vee|wedge)(?![a-zA-Z])"
)
_RELATION = {
    r"\le": "<=",
    r"\ge": ">=",
    r"\ne": "!=",
    "<": "<",
    ">": ">",
    "=": "=",
    r"\approx": "~",
    r"\in": "in",
    r"\equiv": "==",
}
_MATRIX = re.compile(
    r"(?:[\[(]\s*)?\\begin\{(?:[pb]matrix|matrix|array|smallmatrix)\}(?:\s*\{[clr|\s]*\})?(.*?)\\end\{(?:[pb]matrix|matrix|array|smallmatrix)\}(?:\s*[\])])?",
    re.DOTALL,
)
_NESTED = re.compile(r"\[\s*\[([^()\[\]{}]+(?:\]\s*,\s*\[[^()\[\]{}]+)+)\]\s*\]")
_ROW_END = re.compile(r"\]\s*,\s*\[")
_SUCH_THAT = re.compile(
    r"\s*[a-zA-Z]\s*(?:\\in\s*(?:\\mathbb\{R\}|\\mathbb R|\\R)\s*)?(?:\\mid|\\vert|[|:])(.+)", re.DOTALL
)
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}


def structure(latex: str) -> Structure:
    """Return the outermost level of an answer written in LaTeX."""
    latex = _without_braces(latex.strip())
    for find in (_matrix, _set, _list, _relation, _union, _tuple, _plus_minus):
        if found := find(latex):
            return found
    return Structure(Kind.EXPRESSION, (latex,))


def _without_braces(latex: str) -> str:
    """The text without plain braces, or a pair of `$`, around the whole of it."""
    while latex.startswith("{") and _closing(latex) == len(latex):
        latex = latex[1:-1].strip()
    return latex


def _matrix(latex: str) -> Structure | None:
    if nested := _NESTED.fullmatch(latex):
        return Structure(Kind.MATRIX, tuple(row.strip().replace(",", "&") for row in _ROW_END.split(nested[1])))
    found = _MATRIX.fullmatch(latex)
    if not found or r"\begin" in found[1]:
        return None
    rows = [row.strip() for row in re.split(r"\\\\|\\cr(?![a-zA-Z])|\\hline", found[1]) if row.strip()]
    return Structure(Kind.MATRIX, tuple(rows)) if rows else None


def _set(latex: str) -> Structure | None:
    if latex[:2] != r"\{" or _closing(latex) != len(latex):
        return None
    if condition := _SUCH_THAT.fullmatch(latex[2:-2]):
        return structure(condition[1])
    return Structure(Kind.SET, tuple(_items(latex[2:-2])))


def _list(latex: str) -> Structure | None:
    items = _items(latex)
    return Structure(Kind.LIST, tuple(items)) if len(items) > 1 else None


def _items(latex: str) -> list[str]:
    """The members of a list: between semicolons, or "and" between groups of the same size, or commas."""
    groups = [part for part in _split(latex, ";") if part]
    if len(groups) > 1:
        return groups
    spoken = [part.strip(" ,") for part in _split(latex, "and") if part.strip(" ,")]
    sizes = {len(_split(part, ",")) for part in spoken}
    if len(spoken) > 1 and len(sizes) == 1 and sizes != {1} and "=" in latex:
        return spoken
    return [item for part in spoken for item in _split(part, ",") if item]


def _union(latex: str) -> Structure | None:
    parts = _split(latex, r"\cup")
    return Structure(Kind.UNION, tuple(parts)) if len(parts) > 1 else None


def _tuple(latex: str) -> Structure | None:
    opening = next((sign for sign in ("(", "[", r"\langle") if latex.startswith(sign)), "")
    closing = next((sign for sign in (")", "]", r"\rangle") if latex.endswith(sign)), "")
    if not opening or not closing or _closing(latex) != len(latex):
        return None
    inner = latex[len(opening) : -len(closing)]
    parts = [part for part in _split(inner, ";") if part]
    parts = parts if len(parts) > 1 else _split(inner, ",")
    if len(parts) < 2:
        return structure(inner) if (opening, closing) in {("(", ")"), ("[", "]")} else None
    return Structure(Kind.TUPLE, tuple(parts), (opening.replace(r"\langle", "("), closing.replace(r"\rangle", ")")))


def _relation(latex: str) -> Structure | None:
    parts, signs = [""], []
    for token, depth in _tokens(latex):
        if depth == 0 and token in _RELATION:
            parts.append("")
            signs.append(_RELATION[token])
        else:
            parts[-1] += token
    if not signs:
        return None
    kind = Kind.EQUATION if set(signs) <= {"=", "~", "in", "=="} else Kind.INEQUALITY
    return Structure(kind, tuple(part.strip() for part in parts), tuple(signs))


def _plus_minus(latex: str) -> Structure | None:
    r"""`a \pm b` is the list of `a + b` and `a - b`; every `\pm` of it means the same sign."""
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", latex):
        return None
    both = [
        re.sub(r"\\pm(?![a-zA-Z])", plus, re.sub(r"\\mp(?![a-zA-Z])", minus, latex)) for plus, minus in ("+-", "-+")
    ]
    return Structure(Kind.LIST, tuple(each.strip().removeprefix("+") for each in both))


def as_interval(given: Structure) -> tuple[str, Structure] | None:
    r"""Return the variable of an inequality such as `1 < x \le 2`, and the interval that it lies in."""
    parts, signs = given.parts, given.signs
    if any(sign not in _FLIPPED for sign in signs) or len(signs) > 2:
        return None
    if signs[0] in {">", ">="}:
        parts, signs = parts[::-1], tuple(_FLIPPED[sign] for sign in signs[::-1])
    if any(sign in {">", ">="} for sign in signs):
        return None
    if len(signs) == 2:
        low, name, high = parts
        brackets = ("(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]")
    elif is_name(parts[0]):
        (name, high), low = parts, r"-\infty"
        brackets = ("(", ")" if signs[0] == "<" else "]")
    else:
        (low, name), high = parts, r"\infty"
        brackets = ("(" if signs[0] == "<" else "[", ")")
    return (name, Structure(Kind.TUPLE, (low, high), brackets)) if is_name(name) and "|" not in name else None


_OPERATION = re.compile(
    r"\\(?:star|diamond|oplus|otimes|ominus|odot|spadesuit|heartsuit|clubsuit|bullet|dagger|#)|[@#\u2605\u2606]"
)
_NAME = re.compile(
    r"(?!.*\\(?:sqrt|pi|infty))[^0-9+\-*/^<>]*[a-zA-Z][^+\-*/^<>]*(?:\^(?:\\prime|\{\\prime\}|\{-1\})\s*(?:\([^()]*\))?)?"
)


def is_name(latex: str) -> bool:
    r"""Tell whether this names something rather than being a value: `x`, `f(x)`, `(x, y)`, `\angle A`, `5 \star 1`."""
    name = latex.strip()
    return name not in {"e", "i"} and bool(_NAME.fullmatch(name) or _OPERATION.search(name))


def _split(latex: str, separator: str) -> list[str]:
    """The parts between the separators that no bracket encloses."""
    if separator == "and":
        latex = _AND.sub("\x01", latex)
        separator = "\x01"
    parts = [""]
    for token, depth in _tokens(latex):
        if depth == 0 and token == separator:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _closing(latex: str) -> int:
    """Where the bracket that begins the text is closed; -1 if it never is."""
    position = 0
    for token, depth in _tokens(latex):
        position += len(token)
        if depth == 0 and token in _CLOSE:
            return position
    return -1


def _tokens(latex: str) -> Iterator[tuple[str, int]]:
    """Each command and character with how many brackets enclose it; a bracket is outside of itself."""
    depth = 0
    for found in _TOKEN.finditer(latex):
        token = found.group()
        depth -= token in _CLOSE
        yield token, depth
        depth += token in _OPEN
