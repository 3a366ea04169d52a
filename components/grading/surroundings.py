r"""What stands around an answer: the formula that its box is part of, and words that deny, doubt or change it.

Around a box only what is understood may stand: a sign, a currency, a unit, brackets, another name for the value. An
answer within a larger formula is none. Prose is open-ended, so there the words are listed that take an answer back.
"""

import re
from itertools import accumulate
from typing import NamedTuple

from components.grading.reasons import Reason
from components.grading.vocabulary import TEXT_STYLES


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STYLES = _set(
    r"""\displaystyle \textstyle \scriptstyle \large \Large \LARGE \huge \Huge \normalsize \small \bf \rm \it \bfseries
    \left \right \big \Big \bigl \bigr \Bigl \Bigr \limits \nolimits \hfill \noindent \centering \quad \qquad \nobreak
    \allowbreak \nonumber \notag \hline \strut \item \par"""
)
_WRAPPERS = _set(
    r"""\text \textbf \textit \textrm \textnormal \texttt \textsf \emph \mbox \hbox \mathrm \mathbf \mathit \mathsf
    \boldsymbol \bm \underline \color \textcolor \colorbox \fcolorbox \mathbin \mathrel \mathord \ensuremath \boxed
    \fbox \framebox \operatorname"""
)
_INVISIBLE = _set(r"\color \hspace \vspace \hskip \kern \label")
_WORDS_IN = frozenset(f"\\{style}" for style in (*TEXT_STYLES, "hbox"))
_ARROWS = _set(
    r"""\to \rightarrow \Rightarrow \implies \longrightarrow \Longrightarrow \therefore \because \iff \mapsto
    \leadsto \Leftrightarrow \bullet \blacksquare \square \checkmark \newline \cr \triangleright => ==> -> -->"""
)
_VALUE_SIGNS = _set(r"= := ~ \approx \equiv \in \cong \simeq \doteq \coloneqq \triangleq ≈ ≡ ∈ =: \sim")
_ORDER_SIGNS = {
    **dict.fromkeys(["<", r"\lt"], "<"),
    **dict.fromkeys([">", r"\gt"], ">"),
    **dict.fromkeys([r"\le", r"\leq", r"\leqslant", "<=", "≤"], r"\le"),
    **dict.fromkeys([r"\ge", r"\geq", r"\geqslant", ">=", "≥"], r"\ge"),
    **dict.fromkeys([r"\ne", r"\neq", "!=", "≠"], r"\ne"),
}
_TOKEN = re.compile(
    r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*|\n\s*\n|\s+|\d+(?:[.,]\d+)*"
    r"|\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}(?:\{[clr|]+\})?"
    r"|\\[a-zA-Z]+\*?|\\\\(?:\[[^\]]*\])?|\\.|\$\$?|\*\*+|<\|?[a-z/_]+\|?>"
    r"|=+>|-+>|<=|>=|(?<![\w)}])!=|:=|=:|.",
    re.DOTALL,
)
_DELIMITERS = frozenset(["$", "$$", r"\(", r"\)", r"\[", r"\]"])
_SPACES = frozenset([r"\,", r"\;", r"\:", r"\!", r"\ ", r"\>", "&", "\\", "**", "***", "`", '"', "\u201c", "\u201d"])
_SIGNS = {"-": "-", "\u2212": "-", "+": "", r"\pm": r"\pm ", r"\mp": r"\mp "}
_OPERATORS = _set(r"+ - * / ^ _ \cdot \times \div \pm \mp \ast \star \circ · ÷ √ \over ±") | {"\u00d7", "\u2212"}
_CURRENCIES = frozenset([r"\$", "£", "€"])
_BRACKETS = {"(": ")", "[": "]", r"\{": r"\}"}
_VERBS = _set("is are was were be equals equal to gives get gets")
_SIMPLE = re.compile(r"[^=<>,;&]+")
_NUMERIC = re.compile(r"\\?\$?[\d.,{}/]+|\\[dt]?frac\{\d+\}\{\d+\}|[a-zA-Z]|\d*\\sqrt\{?\d+\}?")
_NAME = re.compile(r"(?:[a-zA-Z]|\\[a-z]+)(?:_(?:\{\w+\}|\w))?(?:\([a-z0-9, ]+\))?")
_SCALES = _set(
    "hundred thousand million billion trillion dozen gross grand tenth hundredth thousandth millionth "
    "third fourth fifth sixth seventh eighth ninth half halve quarter percent percentage percentile permille "
    "pair couple score k kilo mega giga lakh crore myriad cent pct triple quadruple quintillion quadrillion"
)
_FIRST_WORD = re.compile(r"[\s$*]*(?:\\[)\]]\s*)?([a-zA-Z]+)")
_FRACTIONAL = re.compile(r"-?\d*\.\d+|-?\\[dt]?frac.*", re.DOTALL)
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_CHOICE = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\s*\{)?\([A-H]\)\}?")
_MAX_BEFORE, _MAX_AFTER = 400, 400


class Reading(NamedTuple):
    """An answer in a box, read with the formula around it."""

    answer: str
    objection: str
    """Why the formula does not let it count; empty where it does."""
    before: str
    """What stands before the formula."""
    after: str
    """What stands behind it."""
    others: tuple[str, ...] = ()
    """Further sides of the same equation."""


class _PartOfFormulaError(Exception):
    """The box holds only a part of a formula."""


def read_box(text: str, start: int, end: int, content: str) -> Reading:
    r"""Return what `text[start:end]`, a box or several in a row, says together with the formula around it.

    `x = -\boxed{5}` says -5, `\boxed{5}\%` says 5\%, and `x > \boxed{5}` says `x > 5`.
    """
    first = max(0, start - _MAX_BEFORE)
    try:
        left = _Left(_tokens(text[first:start]), content)
        if _CHOICE.fullmatch(content):  # what follows says what is chosen
            return Reading(left.applied(content), "", text[: first + left.begin], text[end:])
        right = _Right(_tokens(text[end : end + _MAX_AFTER]), left)
        answer = left.applied(content + right.unit)
    except _PartOfFormulaError as error:
        return Reading(content, str(error) or Reason.PART_OF_FORMULA, "", "")
    before = text[:first] + text[first : first + left.begin]
    return Reading(answer, "", before, text[end + right.end :], tuple(right.others))


def scale_behind(after: str) -> str:
    r"""Return the word for a multiple or a part that begins a text, as `\text{ million}`; empty without one."""
    word = _FIRST_WORD.match(after)
    return rf"\text{{ {word[1]}}}" if word and word[1].lower().rstrip("s") in _SCALES else ""


def _tokens(text: str) -> list[str]:
    """All of a text as tokens."""
    return _TOKEN.findall(text)


def _is_operand(token: str) -> bool:
    return token[0].isdigit() or (token.isalpha() and len(token) == 1) or token[0] == "\\" or token in "({"


class _Left:
    """The part of a formula before a box, read backwards."""

    def __init__(self, tokens: list[str], content: str) -> None:
        self.tokens, self.content = tokens, content
        self.starts = list(accumulate(map(len, tokens), initial=0))
        self.sign = self.currency = self.order = self.side = ""
        self.brackets: list[str] = []
        self.is_crossed = False
        """Whether the formula has a delimiter before the box."""
        self.is_spaced = self.is_below = False
        self.begin = self.starts[-1]
        self._read()

    def applied(self, content: str) -> str:
        """The content of the box with what stands before it."""
        if self.sign:
            if not _SIMPLE.fullmatch(content):
                raise _PartOfFormulaError
            content = self.sign + (content if _NUMERIC.fullmatch(content) else f"({content})")
        if self.currency and not content.startswith((*_CURRENCIES, "$")):
            content = self.currency + content
        return f"{self.side} {self.order} {content}" if self.order else content

    def _read(self) -> None:
        index = len(self.tokens) - 1
        while index >= 0:
            step = self._step(index)
            if step is None:
                return
            self.begin = self.starts[step] if step < len(self.tokens) else self.begin
            index = step - 1

    def _step(self, index: int) -> int | None:
        """Take in a token, or a group of them; where it begins, or None where the formula begins behind it."""
        token = self.tokens[index]
        if token.isspace():
            self.is_spaced, self.is_below = True, self.is_below or "\n" in token
            return None if token.count("\n") > 1 else index
        if token in _STYLES or token in _SPACES or (token in "*_" and not self._is_behind_operand(index)):
            return index
        if token in _DELIMITERS or token.startswith(r"\begin"):
            if self.is_crossed:
                return None
            self.is_crossed, self.is_spaced = True, False
            return index
        return self._step_in_formula(index)

    def _step_in_formula(self, index: int) -> int | None:
        token = self.tokens[index]
        if token in _VALUE_SIGNS or token in _ORDER_SIGNS:
            self._relation(index)
            return None
        if token in {"{", "}"}:
            return self._group(index)
        if token in _SIGNS and not self.sign and not self.currency:
            return self._take_sign(index)
        if token in _CURRENCIES:
            self.currency = token
            return index
        if token in _BRACKETS and not self._is_behind_operand(index):
            self.brackets.append(token)
            return index
        self._end(index)
        return None

    def _end(self, index: int) -> None:
        """Accept that the formula begins behind a token, or raise because that is a part of it."""
        token = self.tokens[index]
        is_apart = self.is_spaced and (self.is_crossed or (self.is_below and not self._is_in_display(index)))
        if token.startswith(r"\end") or token in _ARROWS or is_apart:
            return
        if token.startswith("\\\\"):
            return
        is_decimal = token in ".," and not self.is_spaced and index and self.tokens[index - 1][0].isdigit()
        if is_decimal or (token in ",;" and self._is_in_tuple(index)):
            raise _PartOfFormulaError
        if len(token) > 1 and token.isalpha():
            if not self.is_spaced and not self.is_crossed and index and self._is_mathematics(index - 1):
                raise _PartOfFormulaError
            return
        if token in {"a", "A", "I"} and self.is_spaced:
            return
        if token in _OPERATORS or token in _BRACKETS or _is_operand(token) or (token in ")]|" and not self.is_spaced):
            raise _PartOfFormulaError

    def _is_in_display(self, index: int) -> bool:
        """Whether the last delimiter before a place opens a formula of several lines."""
        for token in reversed(self.tokens[:index]):
            if token in _DELIMITERS or token.startswith((r"\begin", r"\end")):
                return token == r"\[" or token.startswith(r"\begin")
        return False

    def _is_mathematics(self, index: int) -> bool:
        token = self.tokens[index]
        return token in _OPERATORS or token in {"$", r"\(", r"\["} or token[0].isdigit()

    def _is_behind_operand(self, index: int) -> bool:
        """Whether a token stands directly behind something that it may be applied to."""
        if index == 0:
            return False
        before = self.tokens[index - 1]
        return (
            before[0].isalnum()
            or before in ")}]"
            or (before[0] == "\\" and before[1:].isalpha() and before not in _STYLES)
        )

    def _is_in_tuple(self, index: int) -> bool:
        """Whether the comma at a place stands within brackets without words."""
        depth = 0
        for token in reversed(self.tokens[:index]):
            if token in _DELIMITERS or "\n\n" in token or (len(token) > 1 and token.isalpha()):
                return False
            depth += (token in ")]") - (token in "([" or token == r"\{")
            if depth < 0:
                return True
        return False

    def _take_sign(self, index: int) -> int | None:
        r"""Take in a sign, unless it is a dash or a bullet: `Answer - \boxed{5}`."""
        is_loose = self.is_spaced or (index + 1 < len(self.tokens) and self.tokens[index + 1].isspace())
        before = self.tokens[:index]
        last = next((each for each in reversed(before) if not each.isspace()), "")
        in_formula = (
            last in _DELIMITERS or last in _VALUE_SIGNS or last in {"&", ":"} or last.startswith(("\\b", "\\\\"))
        )
        if is_loose and not in_formula and last.lower() not in _VERBS:
            if not before or "\n" in before[-1]:
                return None
            if (len(last) > 1 and last.isalpha()) or last in "*.:)" or last.isalpha():
                return None if not self._is_mathematical(last) else self._raise()
        self.sign = _SIGNS[self.tokens[index]] or "+"
        if self.sign == "+":
            self.sign = ""
        return index

    @staticmethod
    def _is_mathematical(last: str) -> bool:
        return last == ")" or (len(last) == 1 and last.isalpha() and last.isascii())

    @staticmethod
    def _raise() -> int:
        raise _PartOfFormulaError

    def _group(self, index: int) -> int | None:
        """Step out of a brace around the box, or over a group before it."""
        if self.tokens[index] == "{":
            owner = self._owner(index)
            command = self.tokens[owner] if owner < index else ""
            if command not in _WRAPPERS and command:
                raise _PartOfFormulaError
            if not command and index and self.tokens[index - 1] in "^_":
                raise _PartOfFormulaError
            return owner
        opening = self._opening(index)
        owner = self._owner(opening)
        command = self.tokens[owner] if owner < opening else ""
        if command in _INVISIBLE:
            return owner
        if command in _WORDS_IN or (self.is_crossed and self.is_spaced):
            return None
        raise _PartOfFormulaError

    def _opening(self, index: int) -> int:
        depth = 0
        for place in range(index, -1, -1):
            depth += {"}": 1, "{": -1}.get(self.tokens[place], 0)
            if depth == 0:
                return place
        return 0

    def _owner(self, opening: int) -> int:
        """Where the command begins whose argument opens at a place; that place where there is none."""
        place = opening - 1
        while place >= 0 and self.tokens[place] == "}":
            place = self._opening(place) - 1
        is_command = place >= 0 and self.tokens[place][0] == "\\" and self.tokens[place][1:].isalpha()
        return place if is_command and self.tokens[place] not in _STYLES else opening

    def _relation(self, index: int) -> None:
        """Take in the sign of a relation, and find where its formula begins."""
        token = self.tokens[index]
        begin, depth = index, 0
        for place in range(index - 1, -1, -1):
            each = self.tokens[place]
            depth += (each in ")]}") - (each in "([{")
            is_end = each in _ARROWS or each.startswith((r"\begin", r"\end", "\\\\")) or each.count("\n") > 1
            is_word = len(each) > 1 and each.isalpha() and depth == 0
            if is_end or is_word or (each in _DELIMITERS) or (each in {",", ";", ":", ".", "?"} and depth <= 0):
                begin = place if each in _DELIMITERS and not self.is_crossed else place + 1
                break
            begin = place
        self.side = "".join(self.tokens[begin:index]).strip(" \n&$")
        negated = self.side.endswith(r"\not")
        order = _ORDER_SIGNS.get(token, r"\ne" if negated else "")
        if order:
            self.side = self.side.removesuffix(r"\not").strip()
            if not self.side:
                if token == ">" and (index == 0 or "\n" in self.tokens[index - 1]):
                    return  # a quotation
                raise _PartOfFormulaError(Reason.RELATION)
            self.order = order
        self.begin = self.starts[begin] if begin < len(self.tokens) else self.begin


class _Right:
    """The part of a formula behind a box."""

    def __init__(self, tokens: list[str], left: _Left) -> None:
        self.tokens, self.left = tokens, left
        starts = list(accumulate(map(len, tokens), initial=0))
        self.unit = ""
        self.others: list[str] = []
        self.is_crossed = self.is_spaced = False
        self.end = 0
        index = 0
        while index < len(tokens):
            step = self._step(index)
            if step is None:
                break
            step = min(step, len(tokens))
            self.end = starts[step]
            index = step
        if left.brackets and index < len(tokens) and tokens[index] in ",;":
            raise _PartOfFormulaError

    def _text(self, index: int) -> str:
        return self.tokens[index] if index < len(self.tokens) else ""

    def _next(self, index: int) -> int:
        """The place of the next token that is not blank."""
        while self._text(index).isspace() or self._text(index) in _SPACES - {""}:
            index += 1
        return index

    def _step(self, index: int) -> int | None:
        """Take in a token, or a group of them; where it ends, or None where the formula ends before it."""
        token = self._text(index)
        if token.isspace():
            self.is_spaced = True
            return None if token.count("\n") > 1 else index + 1
        if token in _STYLES or token in _SPACES or token == "}":
            return index + 1
        if token in _DELIMITERS or token.startswith(r"\end"):
            if self.is_crossed:
                return None
            self.is_crossed, self.is_spaced = True, False
            return index + 1
        return self._step_in_formula(index)

    def _step_in_formula(self, index: int) -> int | None:
        token = self._text(index)
        if token in {r"\%", "%", "°", r"\degree", "^"}:
            return self._suffix(index)
        if token in {r"\pmod", r"\mod", r"\bmod"}:
            return self._modulus(index)
        if token in _WORDS_IN and self._text(index + 1) == "{":
            return self._unit_in_text(index)
        if token in _VALUE_SIGNS:
            return self._other_side(index)
        if token in _ORDER_SIGNS or token == r"\not":
            raise _PartOfFormulaError(Reason.RELATION)
        return self._step_beyond_value(index)

    def _step_beyond_value(self, index: int) -> int | None:
        token = self._text(index)
        if self.left.brackets and token == _BRACKETS[self.left.brackets[-1]]:
            self.left.brackets.pop()
            return index + 1
        if token in _OPERATORS:
            return self._operator(index)
        self._end(index)
        return None

    def _leads_to_number(self, index: int) -> bool:
        place = self._next(index + 1)
        while self._text(place) in _DELIMITERS:
            place = self._next(place + 1)
        return self._text(place)[:1].isdigit()

    def _suffix(self, index: int) -> int:
        token = self._text(index)
        if token in {r"\%", "%"}:
            if self.unit:
                raise _PartOfFormulaError
            self.unit = r"\%"
            return index + 1
        if token == "^":
            place = self._next(index + 1)
            brace = self._text(place) == "{"
            place = self._next(place + brace)
            if self._text(place) != r"\circ":
                raise _PartOfFormulaError
            index = place + brace
        self.unit = r"^\circ"
        return index + 1

    def _modulus(self, index: int) -> int:
        """Step over a modulus, which leaves a residue that is smaller as it is."""
        place = index + 1
        while self._text(place).isspace() or self._text(place) == "{":
            place += 1
        modulus, content = self._text(place), self.left.content
        if _FRACTIONAL.fullmatch(content):
            raise _PartOfFormulaError(Reason.OTHER)  # a residue that is not whole
        if modulus.isdigit() and content.lstrip("-").isdigit() and abs(int(content)) >= int(modulus):
            raise _PartOfFormulaError(Reason.NOT_REDUCED)
        return place + 1

    def _unit_in_text(self, index: int) -> int | None:
        close = index + 1
        while close < len(self.tokens) and self._text(close) != "}":
            close += 1
        words = "".join(self.tokens[index + 2 : close])
        if len(words.split()) > 2 or not re.fullmatch(r"[a-zA-Z/.\s]*", words) or self.unit:
            return None
        self.unit = rf"\text{{ {words.strip()}}}" if words.strip(" .") else self.unit
        place = close + 1
        if self._text(place) == "^":
            power = self._text(place + 1 + (self._text(place + 1) == "{"))
            if power not in {"2", "3"}:
                raise _PartOfFormulaError
            self.unit += f"^{power}"
            place += 2 + 2 * (self._text(place + 1) == "{")
        return place

    def _other_side(self, index: int) -> int:
        place, depth = index + 1, 0
        while place < len(self.tokens):
            token = self._text(place)
            depth += (token in "([{") - (token in ")]}")
            is_end = token in _DELIMITERS or token in _ARROWS or token in _VALUE_SIGNS or token in _WORDS_IN
            if (
                is_end
                or token.startswith((r"\end", "\\\\"))
                or token.count("\n") > 1
                or (len(token) > 1 and token.isalpha())
            ):
                break
            if depth < 0 or (depth == 0 and token in {",", ";", ".", "?", ":"}):
                break
            place += 1
        side = "".join(self.tokens[index + 1 : place]).strip(" \n&")
        is_description = bool(_VARIABLE.search(side)) and not _VARIABLE.search(self.left.content)
        if (
            side
            and not is_description
            and not _NAME.fullmatch(side)
            and self._text(index) not in {r"\approx", "≈", "~", r"\sim", r"\in"}
        ):
            self.others.append(side)
        return place

    def _operator(self, index: int) -> int | None:
        token, place = self._text(index), self._next(index + 1)
        while token == "-" and self._text(place) == "-":
            place += 1
        operand = self._text(place)
        is_last = place > index + 1 or not operand or not (operand[0].isalnum() or operand[0] in "\\({$")
        if token in "*_" and (is_last or self.is_crossed):
            return index + 1
        if token == "-" and index and "\n" in self._text(index - 1):
            return None
        if operand and (_is_operand(operand) or operand in _DELIMITERS):
            raise _PartOfFormulaError
        if token.startswith("\\") or token in {"+", "*", "^", "_"}:
            raise _PartOfFormulaError
        return None

    def _end(self, index: int) -> None:
        """Accept that the formula ends before a token, or raise because that is a part of it."""
        token, following = self._text(index), self._text(index + 1)
        if token.startswith("\\\\"):
            place = self._next(index + 1)
            if self._text(place) in _OPERATORS:
                raise _PartOfFormulaError
            return
        if token in ".,:\u2013\u2014" and following[:1].isdigit() and not self.is_spaced:
            raise _PartOfFormulaError
        if token.lower().rstrip("s") in _SCALES and not self.unit:
            self.unit = rf"\text{{ {token}}}"
            return
        is_apart = self.is_crossed and self.is_spaced
        if token in _ARROWS and self._leads_to_number(index):
            raise _PartOfFormulaError
        if not (token in _ARROWS or is_apart or (len(token) > 1 and token.isalpha())):
            self._end_within_line(index)

    def _end_within_line(self, index: int) -> None:
        """Accept a sign or a letter behind the formula, or raise because it is a part of it."""
        token, following = self._text(index), self._text(index + 1)
        if (
            token == "!"
            and not self.is_crossed
            and self._text(self._next(index + 1)) in _DELIMITERS | {"!", r"\end{align*}", r"\end{align}"}
        ):
            raise _PartOfFormulaError
        if token == "(" and self.is_spaced and not _is_operand(following):
            return
        if token in {"a", "A", "I"} and self.is_spaced:
            return
        if token.isalpha() and token.isascii() and not self.is_crossed and self.is_spaced and token in "mgslh":
            self.unit += rf"\text{{ {token}}}"
            return
        is_prime = token in {"'", "\u2019"} and not self.is_crossed and self.left.is_crossed
        if _is_operand(token) or token == "[" or is_prime or (token == "|" and not self.is_spaced):
            raise _PartOfFormulaError
