r"""The final answer of a text: in a box as in MATH, after `####` as in GSM8K, or stated in a sentence."""

import re
from dataclasses import dataclass
from itertools import pairwise

from components.grading.units import split_unit
from components.shared.answer_policy import AnswerPolicy

_MARK = "####"
_MARKERS = (_MARK, r"\boxed", r"\fbox")
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"
_NOT_REASONING = re.compile(r"</?think>|\\[(\[]|[\s#$*]")


def final_answer(text: str, policy: AnswerPolicy) -> str | None:
    """Return what the text gives as its answer; None where it gives none in the place that the policy names.

    Of the two markers the later one counts, so a heading such as `#### Step 1` does not hide a box below it. Text
    inside `<think>` does not count. A text that stops in the middle has no answer, whatever numbers it holds.
    """
    said = outside_thoughts(text)
    if policy is AnswerPolicy.BOXED:
        return _boxed(said)
    if policy is AnswerPolicy.MARKED:
        return _marked(said)
    if _MARK in said or "box" in said:
        _, mark, after = said.rpartition(_MARK)
        _, _, rest = after.partition("\n")
        declared = _boxed(rest if mark else said) or _marked(said)
        if declared or policy is AnswerPolicy.DECLARED:
            return declared
    return stated_answer(said) if policy is AnswerPolicy.STATED else None


def has_reasoning(text: str, policy: AnswerPolicy) -> bool:
    """Tell whether anything is written before the final answer; thoughts count, and a bare answer has none."""
    answer = final_answer(text, policy)
    if answer is None:
        return False
    place = max(text.rfind(marker) for marker in _MARKERS)
    before = text[: place if place >= 0 else text.rfind(answer)]
    return bool(_NOT_REASONING.sub("", before))


def _boxed(text: str) -> str | None:
    return (last_boxed(text) if "box" in text else None) or None


def _marked(text: str) -> str | None:
    _, mark, after = text.rpartition(_MARK)
    return (after.partition("\n")[0].strip() or None) if mark else None


def outside_thoughts(text: str) -> str:
    """Return a response without what stands between `<think>` and `</think>`."""
    if "think>" not in text:
        return text
    # Where the prompt itself opened the thought, only its end is in the text.
    return _THOUGHT.sub(" ", text).rpartition(_THOUGHT_END)[2]


_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s${}]*\})*")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_MAX_NESTED = 4
_MAX_JOIN_CHARACTERS = 60
_MAX_BOX_CHARACTERS = 1000  # longer ones are no answer, whatever is in them
_DELIMITERS = re.compile(r"[\s$]*(?:\\[()\[\]][\s$]*)*")
_JOIN = re.compile(r"(?=.*(?:[,;]|\b(?:and|or)\b))(?:[^.!?]|\\[!.])*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Box:
    """One box of a text: `text[start:end]` is the whole of it."""

    start: int
    end: int
    content: str


def last_boxed(text: str) -> str | None:
    r"""Return what stands in the last box; None without a box, or where the last one is never closed.

    Boxes that follow one another within a sentence, as in `\boxed{1} and \boxed{2}`, are one answer: a list.
    """
    boxes, all_closed = _read(text)
    if not boxes or not all_closed:
        return None
    first = len(boxes) - 1
    while first and _goes_on(text, boxes[first - 1], boxes[first]):
        first -= 1
    return ", ".join(dict.fromkeys(box.content for box in boxes[first:]))


def _goes_on(text: str, box: Box, other: Box) -> bool:
    """Whether nothing but "and", commas and a few words stands between two boxes."""
    between = text[box.end : other.start] if other.start - box.end <= _MAX_JOIN_CHARACTERS else "."
    return bool(_DELIMITERS.fullmatch(between) or _JOIN.fullmatch(between))


def find_boxes(text: str) -> list[Box]:
    """Return each closed box with its place in the text."""
    return _read(text)[0]


def _read(text: str) -> tuple[list[Box], bool]:
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
    """What a box holds whose content begins at `start`, and where the box ends; None where it is never closed."""
    if text.startswith("{", start):
        end = _closing_brace(text, start)
        return (None, len(text)) if end is None else (text[start + 1 : end].strip(), end + 1)
    found = _UNBRACED.match(text, start)
    content = found.group().rstrip(".,;:") if found else ""
    return content, start + len(content)


def _closing_brace(text: str, start: int) -> int | None:
    r"""The index of the brace that closes the one at `start`; `\{` and `\}` are text."""
    depth = 0
    for found in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None


def _innermost(content: str) -> str:
    """What counts of a box that holds nothing but another box: the content of the inner one."""
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
_NAMES_IT = re.compile(r"^(?:the|a|an|that)\b|\b(?:is|are|equals)\b|=", re.IGNORECASE)
_BLOCK = re.compile(
    # What is longer is no answer, and looking for its end in vain at every place would take long.
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
_SAYS_WORDS = re.compile(
    r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?:'[a-z]+)?\s+(?:[^\W\d]{2,})|\b(?:is|are|equals)\b|[\u3040-\u30ff\u4e00-\u9fff]{2,}"
)
_MAX_CHARACTERS = 4000
_MAX_BARE_CHARACTERS = 300
_MAX_LINE_CHARACTERS = 100


def stated_answer(text: str) -> str | None:
    """Return what the last sentence that states an answer gives; None where there is no such sentence.

    A text that is nothing but an answer states it. A conclusion counts only as the end of a text, in a finished
    sentence. What is conditional, denied or asked states nothing.
    """
    # An answer stands at the end, and what a model wrote may be long and built to be slow to search.
    end = _SPECIAL_TOKENS.split(text)[0].strip()[-_MAX_CHARACTERS:]
    said = _HOPE.sub("", _CALCULATION.sub("", end)).strip()
    phrases = list(_STATES.finditer(said))
    return _after_phrase(said, phrases[-1]) if phrases else _bare(said) or _concluded(said)


def _after_phrase(said: str, phrase: re.Match[str]) -> str | None:
    answer = _until_end(said, phrase.end())
    after = said[phrase.end() + len(answer) :]
    is_question = answer.endswith("?") or after.lstrip("*\"' ").startswith("?")
    before = _SENTENCE_BEGIN.split(said[: phrase.start()])[-1]
    is_denied = _CONDITION.search(before) or _DENIAL.match(answer) or _RETRACTION.search(after[:80])
    if is_question or is_denied:
        return None
    if not _SAYS_WORDS.match(answer) or not re.search("[0-9$]", answer):
        return answer or None
    # "Final Answer: The area is 12" says what it is the answer to; "The answer is in chapter 12" does not say it.
    return _last_value(answer) if phrase["verb"] == ":" or _NAMES_IT.search(answer) else None


def _until_end(said: str, start: int) -> str:
    """From `start` to the end of the sentence; a formula that begins there is taken as a whole."""
    if (block := _BLOCK.match(said, start)) and not re.match(r"\s*[^\W\d_]|\s*[$\\]", said[block.end() :].lstrip(".,")):
        return next(group for group in block.groups() if group is not None).strip()
    end = _SENTENCE_END.search(said, start)
    sentence = _ASIDE.split(said[start : end.start() if end else len(said)])[0]
    return sentence.strip().rstrip(".!\u3002").strip("\"' ")


def _bare(said: str) -> str | None:
    """The whole text, where it has no words beyond those of an answer."""
    if not said or len(said) > _MAX_BARE_CHARACTERS or "\n\n" in said or _has_label(said):
        return None
    has_words = _SAYS_WORDS.search(_BLOCK.sub(" ", said))
    return said if not has_words or (said[0].isdigit() and split_unit(said)[1]) else None


def _has_label(said: str) -> bool:
    """Whether a word stands before a formula, as in "Answer $9$"."""
    block = _BLOCK.search(said)
    return bool(block and re.search(r"[^\W\d_]{3,}", said[: block.start()]))


def _concluded(said: str) -> str | None:
    """What the last sentence comes to, if it is finished and concludes, or is the only one."""
    sentences = [part for part in _sentences(said) if part.strip()]
    if not sentences or "?" in sentences[-1]:
        return None
    last = sentences[-1].strip()
    if len(sentences) > 1 and _BLOCK.fullmatch(last):  # a formula on a line of its own ends the sentence before it
        last = f"{sentences[-2].strip()} {last}"
    value = _last_value(last)
    if value is None or _DENIES.search(last) or not (_FINISHED.search(last) or last.endswith(value)):
        return None
    is_only = len(sentences) == 1 or _is_line(said)
    return value if _CONCLUDES.search(last) or (is_only and (_BLOCK.search(last) or _INTRODUCES.search(last))) else None


def _is_line(said: str) -> bool:
    return len(said) <= _MAX_LINE_CHARACTERS and "\n" not in said


def _sentences(said: str) -> list[str]:
    """The sentences of a text; full stops inside formulas end none."""
    hidden = _BLOCK.sub(lambda found: "\x00" * len(found.group()), said)
    ends = {found.end() for found in _SENTENCE_END.finditer(hidden)}
    ends |= {found.end() for found in _DISPLAY_END.finditer(said)}
    cuts = [0, *sorted(ends), len(said)]
    return [said[start:end] for start, end in pairwise(cuts)]


def _last_value(sentence: str) -> str | None:
    """The formula or number that follows the last "is" of a sentence, or else its last one."""
    hidden = _BLOCK.sub(lambda found: "\x00" * len(found.group()), sentence)
    values = [(found.start(), next(group for group in found.groups() if group)) for found in _BLOCK.finditer(sentence)]
    values += [(found.start(), found.group()) for found in _NUMBERS.finditer(hidden)]
    copulas = [found.end() for found in _COPULA.finditer(hidden)]
    after = [(place, value) for place, value in sorted(values) if copulas and place >= copulas[-1] - 1]
    if not values:
        return None
    place, value = after[0] if after else max(values)
    return None if _GOVERNED.search(hidden[max(0, place - 80) : place]) else value.strip() or None
