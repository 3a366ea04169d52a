r"""The final answer of a text: in a box as in MATH, after `####` as in GSM8K, or stated in a sentence."""

import re
from itertools import pairwise
from typing import NamedTuple

from components.grading.units import split_unit
from components.shared.answer_policy import AnswerPolicy

_MARKER = "####"
_DECLARATIONS = (_MARKER, r"\boxed", r"\fbox")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"
_NOT_REASONING = re.compile(r"</?think>|\\[(\[]|[\s#$*]")


def final_answer(text: str, policy: AnswerPolicy) -> str | None:
    """Return the answer that stands where the policy looks for it; None where there is none.

    Of the two markers the later one counts, so a heading such as `#### Step 1` does not hide a box below it. Text
    inside `<think>` does not count. A text that breaks off has no answer, even if it contains numbers.
    """
    text = outside_thoughts(text)
    if policy is AnswerPolicy.BOXED:
        return _boxed(text)
    if policy is AnswerPolicy.MARKED:
        return _marked(text)
    if _MARKER in text or "box" in text:
        _, marker, after = text.rpartition(_MARKER)
        _, _, rest = after.partition("\n")
        declared = _boxed(rest if marker else text) or _marked(text)
        if declared or policy is AnswerPolicy.DECLARED:
            return declared
    return stated_answer(text) if policy is AnswerPolicy.STATED else None


def has_reasoning(text: str, policy: AnswerPolicy) -> bool:
    """Tell whether anything is written before the final answer; thoughts count, and a bare answer has none."""
    answer = final_answer(text, policy)
    if answer is None:
        return False
    place = max(text.rfind(marker) for marker in _DECLARATIONS)
    before = text[: place if place >= 0 else text.rfind(answer)]
    return bool(_NOT_REASONING.sub("", before))


def outside_thoughts(text: str) -> str:
    """Return a response without what stands between `<think>` and `</think>`."""
    if "think>" not in text:
        return text
    # Where the prompt itself opened the thought, only its end is in the text.
    return _THOUGHT.sub(" ", text).rpartition(_THOUGHT_END)[2]


def _boxed(text: str) -> str | None:
    return last_boxed(text) or None


def _marked(text: str) -> str | None:
    _, marker, after = text.rpartition(_MARKER)
    return (after.partition("\n")[0].strip() or None) if marker else None


_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s${}]*\})*")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_MAX_NESTED = 4
_MAX_JOIN_CHARACTERS = 60
_MAX_BOX_CHARACTERS = 1000  # longer content is not an answer
# Nothing but "and", commas and a few words stands between boxes that are one answer.
_DELIMITERS = re.compile(r"[\s$]*(?:\\[()\[\]][\s$]*)*")
_JOIN = re.compile(r"(?=.*(?:[,;]|\b(?:and|or)\b))(?:[^.!?]|\\[!.])*", re.DOTALL)


class Box(NamedTuple):
    r"""One `\boxed{}` of a text: `text[start:end]` is the whole of it."""

    start: int
    end: int
    content: str


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last box; None without a box, or where the last one is never closed.

    Boxes that follow one another within a sentence, as in `\boxed{1} and \boxed{2}`, are one answer: a list.
    """
    boxes, all_closed = _boxes(text)
    if not boxes or not all_closed:
        return None
    first = len(boxes) - 1
    while first and boxes[first].start - boxes[first - 1].end <= _MAX_JOIN_CHARACTERS:
        between = text[boxes[first - 1].end : boxes[first].start]
        if not _DELIMITERS.fullmatch(between) and not _JOIN.fullmatch(between):
            break
        first -= 1
    return ", ".join(dict.fromkeys(box.content for box in boxes[first:]))


def find_boxes(text: str) -> list[Box]:
    r"""Return each closed `\boxed{...}`, `\fbox{...}` or `\boxed 2`, with its place in the text."""
    return _boxes(text)[0]


def _boxes(text: str) -> tuple[list[Box], bool]:
    """The boxes up to the first that is never closed, and whether all are closed."""
    boxes: list[Box] = []
    position = 0
    while command := _COMMAND.search(text, position):
        content, position = _content(text, command.end())
        if content is None:
            return boxes, False
        boxes.append(Box(command.start(), position, _innermost(content)))
    return boxes, True


def _content(text: str, start: int) -> tuple[str | None, int]:
    """The content of a box that begins at `start`, and where the box ends; None where it is never closed."""
    if not text.startswith("{", start):
        unbraced = _UNBRACED.match(text, start)
        content = unbraced.group().rstrip(".,;:") if unbraced else ""
        return content, start + len(content)
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)  # escaped ones are text
        if depth == 0:
            return text[start + 1 : match.start()].strip(), match.end()
    return None, len(text)


def _innermost(content: str) -> str:
    """The content of the innermost box, where a box holds nothing but another one."""
    for _ in range(_MAX_NESTED if len(content) <= _MAX_BOX_CHARACTERS else 0):
        command = _COMMAND.match(content)
        inner, end = _content(content, command.end()) if command else (None, 0)
        if inner is None or end < len(content):
            return content
        content = inner
    return content


_SPECIAL_TOKENS = re.compile(r"<\|[a-z_]+\|>")
_HOPE = re.compile(r"I hope (?:it|this) is correct\.?$")
_STATES = re.compile(
    r"(?<![a-zA-Z])(?:final answer|answer|answer to [^.\n:]{1,60})[\W_]{0,3}"
    r"(?P<verb>is|:|=|would be|must be)"
    r"(?:\s+(?:therefore|thus|then|exactly|simply|just|now|clearly|indeed))?[\s:*]*"
    r"|^A:\s*|^[#* \t]{0,10}(?:final )?answer[*:]*\n\s*|\u7b54\u6848(?:\u662f|\u4e3a)?[\s:\uff1a*]*",
    re.IGNORECASE | re.MULTILINE,
)
_CONDITION = re.compile(
    r"\b(?:if|whether|unless|suppose|assume|never|what|wrong|incorrect|doubt|why|false)\b|\bno\s*$|\bnot\b(?!\s*,)|n't\b",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"(?:not|never|neither|unknown|unclear|wrong|incorrect|either)\b", re.IGNORECASE)
_DENIES = re.compile(r"\b(?:is not|isn't|cannot be|can't be) the (?:final |right |correct )?answer\b", re.IGNORECASE)
_RETRACTION = re.compile(
    r"\b(?:actually|wait|no|wrong|instead|mistake|sorry|correction|oops|however|hmm|scratch|second thought)\b",
    re.IGNORECASE,
)
_INTRODUCES = re.compile(
    r"[:=\u2248]|\b(?:is|are|equals?|was|were|be|about|approximately|roughly)\b|'s\b", re.IGNORECASE
)
_NAMES_SUBJECT = re.compile(r"^(?:the|a|an|that)\b|\b(?:is|are|equals)\b|=", re.IGNORECASE)
_FORMULA = re.compile(
    # Longer formulas are not answers, and searching for the end of each would take quadratic time.
    r"(?:\$\$(.{1,300}?)\$\$|\\\[(.{1,300}?)\\\]|\\\((.{1,300}?)\\\)|\$(?![?!.])((?:[^$\\]|\\.){1,300})\$"
    r"|(?<![\\\w])\[ ([^\[\]\n]{1,300}) \])",  # what is left of \[ 5 \] where backslashes got lost
    re.DOTALL,
)
_DISPLAY_END = re.compile(r"(?:\$\$|\\\])(?=\s+[A-Z])")
_COPULA = re.compile(r"\b(?:is|are|equals?|gives?|was|were|be|by)\b|'s\b|[=\u2248]", re.IGNORECASE)
_GOVERNED = re.compile(
    r"(?:n't|cannot|\b(?:not|never|less|more|greater|than|below|above|under|over|least|most|twice|half|between|times|plus"
    r"|minus|divided by|root of|squared?|power of|exclude|except|different from|other than))"
    r"(?:\s+(?:be|equal|equal to|of|the))*\s*[($]*$",
    re.IGNORECASE,
)
_SENTENCE_BEGIN = re.compile(r"[.!?;\u3002\n]")
_SENTENCE_END = re.compile(r"(?:[.!?]['\")*\]]*(?=\s)|\u3002(?=.)|\n)")
_CONCLUDES = re.compile(
    r"(?:therefore|thus|hence|so|consequently|in conclusion|in total|altogether|finally|final answer|"
    r"we (?:find|get|have))\b|\u6240\u4ee5|\u56e0\u6b64|\u6545",
    re.IGNORECASE,
)
_FINISHED = re.compile(r"(?:[.!\u3002]|\$|\\\]|\\\))[*\s]*$")
_NUMBER = (
    r"(?<![a-zA-Z0-9_.,/^{(])[-+\u2212]?(?:\\?[$€£]\s?)?"
    r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.?\d+)(?:/\d+)?|\\[dt]?frac\{-?\d+\}\{\d+\})"
    r"(?:\s?(?:\\?%|€|£|\$|percent\b|°|[a-zA-Z]{1,2}[²³](?!\w)))?"
)
_NUMBERS = re.compile(_NUMBER + r"(?:\s*(?:,|,?\s*(?:and|or)\s)\s*" + _NUMBER + r")*(?![a-zA-Z0-9_^]|[.,]\d)")
_ASIDE = re.compile(r"(?<=[0-9$)}]),\s+(?:as|which|since|because|so)\b")
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator marks
_HAS_WORDS = re.compile(
    r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?:'[a-z]+)?\s+(?:[^\W\d]{2,})|\b(?:is|are|equals)\b|[\u3040-\u30ff\u4e00-\u9fff]{2,}"
)
_MAX_CHARACTERS = 4000
_MAX_BARE_CHARACTERS = 300
_MAX_LINE_CHARACTERS = 100


def stated_answer(text: str) -> str | None:
    """Return the answer of the last sentence that states one in words; None where there is no such sentence.

    A text that is nothing but an answer states it. A conclusion counts only as the end of a text, in a finished
    sentence. What is conditional, denied or asked states nothing.
    """
    # An answer stands at the end, and what a model wrote may be long and built to be slow to search.
    end = _SPECIAL_TOKENS.split(text)[0].strip()[-_MAX_CHARACTERS:]
    text = _HOPE.sub("", _CALCULATION.sub("", end)).strip()
    phrases = list(_STATES.finditer(text))
    return _after_phrase(text, phrases[-1]) if phrases else _bare(text) or _concluded(text)


def _after_phrase(text: str, phrase: re.Match[str]) -> str | None:
    """What follows a phrase such as "The answer is", unless it is a question, conditional, denied or retracted."""
    answer = _until_end(text, phrase.end())
    after = text[phrase.end() + len(answer) :]
    before = _SENTENCE_BEGIN.split(text[: phrase.start()])[-1]
    if answer.endswith("?") or after.lstrip("*\"' ").startswith("?"):
        return None
    if _CONDITION.search(before) or _DENIAL.match(answer) or _RETRACTION.search(after[:80]):
        return None
    if not _HAS_WORDS.match(answer) or not re.search("[0-9$]", answer):
        return answer or None
    # "Final Answer: The area is 12" names its subject and gives a value; "The answer is in chapter 12" gives none.
    return _last_value(answer) if phrase["verb"] == ":" or _NAMES_SUBJECT.search(answer) else None


def _until_end(text: str, start: int) -> str:
    """From `start` to the end of the sentence; a formula that begins there is taken as a whole."""
    formula = _FORMULA.match(text, start)
    if formula and not re.match(r"\s*[^\W\d_]|\s*[$\\]", text[formula.end() :].lstrip(".,")):
        return next(group for group in formula.groups() if group is not None).strip()
    end = _SENTENCE_END.search(text, start)
    sentence = _ASIDE.split(text[start : end.start() if end else len(text)])[0]
    return sentence.strip().rstrip(".!\u3002").strip("\"' ")


def _bare(text: str) -> str | None:
    """The whole text, where it has no words beyond those of an answer."""
    if not text or len(text) > _MAX_BARE_CHARACTERS or "\n\n" in text:
        return None
    formula = _FORMULA.search(text)
    if formula and re.search(r"[^\W\d_]{3,}", text[: formula.start()]):  # a label, as in "Answer $9$"
        return None
    has_words = _HAS_WORDS.search(_FORMULA.sub(" ", text))
    return text if not has_words or (text[0].isdigit() and split_unit(text)[1]) else None


def _concluded(text: str) -> str | None:
    """The value that the last sentence gives, if it is finished and concludes, or is the only one."""
    # Full stops inside formulas end no sentence.
    ends = {match.end() for match in _SENTENCE_END.finditer(_without_formulas(text))}
    ends |= {match.end() for match in _DISPLAY_END.finditer(text)}
    sentences = [part for start, end in pairwise([0, *sorted(ends), len(text)]) if (part := text[start:end]).strip()]
    if not sentences or "?" in sentences[-1]:
        return None
    last = sentences[-1].strip()
    if len(sentences) > 1 and _FORMULA.fullmatch(last):  # a formula on a line of its own ends the sentence before it
        last = f"{sentences[-2].strip()} {last}"
    value = _last_value(last)
    if value is None or _DENIES.search(last) or not (_FINISHED.search(last) or last.endswith(value)):
        return None
    is_only = len(sentences) == 1 or (len(text) <= _MAX_LINE_CHARACTERS and "\n" not in text)
    concludes = _CONCLUDES.search(last) or (is_only and (_FORMULA.search(last) or _INTRODUCES.search(last)))
    return value if concludes else None


def _last_value(sentence: str) -> str | None:
    """The formula or number that follows the last "is" of a sentence, or else its last one."""
    words = _without_formulas(sentence)
    formulas = ((match.start(), next(filter(None, match.groups()))) for match in _FORMULA.finditer(sentence))
    values = [*formulas, *((match.start(), match.group()) for match in _NUMBERS.finditer(words))]
    if not values:
        return None
    copulas = [match.end() for match in _COPULA.finditer(words)]
    after = [(place, value) for place, value in sorted(values) if copulas and place >= copulas[-1] - 1]
    place, value = after[0] if after else max(values)
    return None if _GOVERNED.search(words[max(0, place - 80) : place]) else value.strip() or None


_LAST_NUMBER = re.compile(r"(?<![\w.{^])[-\u2212]?(?:\\?[$€£])?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?")


def last_formula_or_number(text: str, *, formulas: bool) -> str | None:
    """Return the last number of a text, or its last formula where no number follows it; None without either.

    Without `formulas` all numbers count, and nothing else.
    """
    end = _SPECIAL_TOKENS.split(text)[0][-_MAX_CHARACTERS:]
    # Between two amounts in dollars stand words.
    found = [match for match in _FORMULA.finditer(end) if not _HAS_WORDS.search(match.group())] if formulas else []
    numbers = _LAST_NUMBER.findall(end, found[-1].end() if found else 0)
    if numbers:
        return str(numbers[-1])
    return next(filter(None, found[-1].groups())).strip() or None if found else None


def _without_formulas(text: str) -> str:
    """The text with formulas blanked out, every other character in its place."""
    return _FORMULA.sub(lambda match: "\x00" * len(match.group()), text)
