r"""The final answer of a text: the last one that it states, in a box, after `####`, in `<answer>` or in a sentence.

Text around an answer counts only if it is part of the value, such as a minus sign before a box or a unit after it, or
states another answer; a text may check or doubt itself. An answer and the words that introduce it are in one line.
"""

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from components.grading.quantities import NUMBER_WORDS, parse_number, parse_number_in_words
from components.grading.units import split_unit
from components.grading.vocabulary import TEXT_STYLES
from components.shared.answer_policy import AnswerPolicy

_MARKER = "####"
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"
_NOT_REASONING = re.compile(r"</?(?:think|answer)>|\\[(\[]|[\s#$*]")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).){1,1000})</answer>", re.DOTALL)
_STRUCK_OUT = re.compile(r"~~[^~\n]{1,300}~~|<(s|del|strike)>[^<\n]{1,300}</\1>")


class Span(NamedTuple):
    r"""A box, a formula or a number in a text; `text[start:end]` is the whole command or formula with delimiters."""

    start: int
    end: int
    content: str


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The answer of a text."""

    text: str
    others: tuple[str, ...] = ()
    """Other forms of the answer in the text, which must be right, too."""
    place: int = 0
    """Where the answer, or a mark such as `####` before it, begins in the text."""


def final_answer(text: str, policy: AnswerPolicy) -> str | None:
    """Return the answer where the policy looks for it; None without one."""
    answer = find_answer(text, policy)
    return answer.text if answer else None


def find_answer(text: str, policy: AnswerPolicy) -> FinalAnswer | None:
    """Return the last answer that is stated where the policy looks for it; None without one.

    Text inside `<think>` and struck-out text do not count.
    """
    text = _STRUCK_OUT.sub(lambda match: " " * len(match[0]), outside_thoughts(text))
    readers = _DECLARED_FORMS.get(policy, _DECLARED_FORMS[AnswerPolicy.DECLARED])
    declared = max(filter(None, (read(text) for read in readers)), key=attrgetter("place"), default=None)
    later = _stated_after(text, declared) if declared else None
    if policy in _DECLARED_FORMS:  # a sentence cannot replace the declared answer, but may contradict it
        if declared and later:
            return replace(declared, others=(*declared.others, later.text))
        return declared
    return later or declared or _stated(text, last_sentence=policy is AnswerPolicy.LAST_SENTENCE)


def has_reasoning(text: str, policy: AnswerPolicy) -> bool:
    """Tell whether there is text before the final answer, thoughts included."""
    answer = find_answer(text, policy)
    if answer is None:
        return False
    thoughts = text.rpartition(_THOUGHT_END)[0]
    before = outside_thoughts(text)[: answer.place]
    return bool(_NOT_REASONING.sub("", thoughts + before))


def outside_thoughts(text: str) -> str:
    """Return a response without the text between `<think>` and `</think>`."""
    # If the prompt opened the thought, the text has only its end.
    return _THOUGHT.sub(" ", text).rpartition(_THOUGHT_END)[2]


# Answers with a mark.


def _tagged(text: str) -> FinalAnswer | None:
    """The answer that the content of the last `<answer>` states, or else all of the content."""
    tags = list(_TAGGED.finditer(text))
    content = tags[-1][1].strip() if tags else ""
    if not content:
        return None
    answer = find_answer(content, AnswerPolicy.LAST_SENTENCE) or FinalAnswer(content)
    return replace(answer, place=tags[-1].start())


def _boxed(text: str) -> FinalAnswer | None:
    """The last box, or the last list of boxes, with the sign, relation and unit beside each."""
    group = _last_boxes(text)
    if not group or not all(box.content for box in group):
        return None
    contents = []
    for index, box in enumerate(group):
        # The text beside a box ends at the next box on that side.
        begin = group[index - 1].end if index else 0
        end = group[index + 1].start if box is not group[-1] else len(text)
        before = text[max(begin, box.start - _MAX_BESIDE_CHARACTERS) : box.start]
        after = text[box.end : min(end, box.end + _MAX_BESIDE_CHARACTERS)]
        contents.append(_with_neighbors(before, box.content, after))
    answer = ", ".join(dict.fromkeys(contents))
    after_group = text[group[-1].end : group[-1].end + 2 * _MAX_BESIDE_CHARACTERS]
    opening = text[: group[0].start].rstrip()[-1:]
    closing = after_group.lstrip()[:1]
    if len(group) > 1 and opening in {"(", "["} and closing in {")", "]"}:
        answer = f"{opening}{answer}{closing}"
    other = _OTHER_FORM.match(after_group)
    others: tuple[str, ...] = (other["formula"] or other["number"] or other["words"],) if other else ()
    return FinalAnswer(answer, others, group[0].start)


_MAX_BESIDE_CHARACTERS = 80
_BEFORE_BOX = re.compile(
    r"(?:^|[=$:(\[{\n]|\\[(\[]|\b(?:is|equals|be|to|of|get|gives?)\b)[ *]*"
    r"(?P<part>[-\u2212]\s*(?:\\\$|[€£])?|\\pm\s*|(?:\\\$|[€£])\s*)\$?$"
)
_RELATION_BEFORE_BOX = re.compile(
    r"(?:(?<![a-zA-Z\\])(?P<name>[a-zA-Z]))?[\s)}]*(?P<sign>[<>\u2264\u2265\u2260]|!=|\\not\s*(?:=|\\[a-z]+)|\\nmid"
    r"|\\(?:leq?|geq?|neq?|lt|gt|leqslant|geqslant)(?![a-zA-Z]))[\s$]*$"
)
_TAG_BEFORE_BOX = re.compile(r"</?[a-z]+>\s*$")
_BULLET_OR_QUOTE = re.compile(r"(?:^|\n)\s*(?:-\s|>)\s*(?:\$+|\\[(\[])?\s*$")
_UNIT_BEHIND_BOX = re.compile(
    r"\s*(?P<sign>\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°|\\pi(?![a-zA-Z])|\u03c0)"
    rf"|\s*(?:\\[,;: ]|~)*\s*(?P<text>\\(?:{'|'.join(TEXT_STYLES)})\s*\{{[^{{}}\n]{{1,40}}\}}(?:\^\{{?[23]\}}?)?)"
)
_RESULT_BEHIND_BOX = re.compile(r"\s*=\s*(-?[0-9][0-9.,/]*[0-9]|-?[0-9])(?=[\s$.,;]|\\[)\]]|$)")
_SIMPLE = re.compile(r"[^=<>,;&]+")


def _with_neighbors(before: str, content: str, after: str) -> str:
    """The content of a box with the sign or relation before it and the unit, result or scale after it, if any."""
    if not _SIMPLE.fullmatch(content):  # a list or relation
        return content
    before = _TAG_BEFORE_BOX.sub("", before)
    if not _BULLET_OR_QUOTE.search(before):
        if relation := _RELATION_BEFORE_BOX.search(before):
            return f"{relation['name'] or 'x'} {relation['sign']} {content}"
        if match := _BEFORE_BOX.search(before):
            is_minus = match["part"].strip() in {"-", "\u2212"}
            is_negated_sum = is_minus and re.search(r"[-+]|\\pm", content.lstrip("-+"))
            content = match["part"] + (f"({content})" if is_negated_sum else content)
    if behind := _UNIT_BEHIND_BOX.match(after):
        unit = behind["sign"] or behind["text"]
        if behind["sign"] or split_unit(f"{content} {unit}")[1]:
            return content + unit
    if result := _RESULT_BEHIND_BOX.match(after):
        return f"{content} = {result[1]}"
    return content + scale_behind(after)


_SCALES = (
    "hundred thousand million billion trillion dozen tenth hundredth thousandth millionth third fourth fifth sixth "
    "seventh eighth ninth half halve quarter percent"
)
_FIRST_WORD = re.compile(r"[\s$*~]*(?:\\[)\], ;:]\s*)*(?:\\(?:text|mathrm|mbox)\s*\{\s*)?([a-zA-Z]+)")


def scale_behind(after: str) -> str:
    r"""Return the first word of a text as `\text{ million}` if it is a multiple or a fraction; otherwise empty."""
    word = _FIRST_WORD.match(after)
    return rf"\text{{ {word[1]}}}" if word and word[1].lower().rstrip("s") in _SCALES.split() else ""


def _marked(text: str) -> FinalAnswer | None:
    """The line after the last `####` that does not begin a heading such as `#### Verification`."""
    end = len(text)
    while (place := text.rfind(_MARKER, 0, end)) >= 0:
        line, _, below = text[place + len(_MARKER) : end].partition("\n")
        line = _before_special_tokens(line).strip()
        if _ANSWER_HEADING.fullmatch(line):
            line, _, below = below.lstrip().partition("\n")
        if not _HEADING.fullmatch(line):
            return _read_line(line, place) if line.strip() else None
        end = place
    return None


def _read_line(line: str, place: int) -> FinalAnswer:
    """The answer in a line after `####`; it may be in a box, in a sentence or before a gloss as in `5 (five)`."""
    if boxed := _boxed(line):
        return replace(boxed, place=place)
    if len(line) > _MAX_BARE_CHARACTERS:
        return FinalAnswer(line, place=place)
    line = _CODE.sub(r"\2", line)
    if remark := _REMARK_BEHIND_NUMBER.match(line):
        line = remark[1]
    if gloss := _GLOSS.fullmatch(line):
        if parse_number(gloss["gloss"]) or parse_number_in_words(gloss["gloss"].lower()):
            return FinalAnswer(gloss["value"], (gloss["gloss"],), place)
        if gloss["gloss"].replace(" ", "").isalpha():
            line = f"{gloss['value']} {gloss['gloss']}"
    elif " " in line and (value := _only_value(line) or _leading_count(line)):
        line = value
    return FinalAnswer(line, place=place)


def _only_value(line: str) -> str | None:
    """The value in a sentence with only one, such as "Jane has 5 apples."; None for any other line."""
    if not _SUBJECT_AND_VERB.match(line) or _NO_STATEMENT.search(line):
        return None
    value = _last_value(line)
    if value is None:
        return None
    num_numbers = len(_DIGITS.findall(_without_formulas(line) if "$" in value.content else line))
    after = line[value.end :]
    if num_numbers != 1 or _CHANGED_BEHIND.match(after):
        return None
    return value.content + scale_behind(after)


def _leading_count(line: str) -> str | None:
    """The number and noun at the beginning of a sentence such as "5 apples are left."; None for any other line."""
    match = _COUNTED.fullmatch(line)
    if not match or _NO_STATEMENT.search(line) or len(_DIGITS.findall(line)) != 1:
        return None
    if not _NOT_BEHIND_COUNTED.isdisjoint(match["rest"].lower().split()):
        return None
    return match["number"].replace("*", "") + match["noun"]


_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_UNBRACED = re.compile(r"[^\s${}]+(?:\{[^\s${}]*\})*")
_BRACE = re.compile(r"\\[\\{}]|[{}]")

_MAX_JOIN_CHARACTERS = 60
_MAX_BOX_CHARACTERS = 1000  # longer content is not an answer
# Only "and", commas and a few words may be between boxes that are one answer.
_DELIMITERS = re.compile(r"[\s$]*(?:\\[()\[\]][\s$]*)*")
_CONCLUDES_LIST = re.compile(
    r"\b(?:so|thus|hence|therefore|then|giv(?:es|ing)|mak(?:es|ing)|for an?|sum|total|product|difference|ratio|quotient"
    r"|average|mean|altogether|answer|which|whose|add(?:s|ing)?|multiply(?:ing)?|yield(?:s|ing)?|result|leav(?:es|ing)"
    r"|that is|final(?:ly)?|distance|area|perimeter|volume|minus|plus|times|their|we (?:get|have|find|obtain))\b"
    r"|[+*/^-]|\\(?:cdot|times|to|implies|[rR]ightarrow)",
    re.IGNORECASE,
)
_JOIN = re.compile(r"(?=.*(?:[,;]|\b(?:and|or)\b))(?:[^.!?]|\\[!.])*", re.DOTALL)


def _last_boxes(text: str) -> list[Span]:
    """The last box and those before it in the same list; none if the last box is never closed."""
    boxes = find_boxes(text)
    if not boxes or _COMMAND.search(text, boxes[-1].end):
        return []
    first = len(boxes) - 1
    while first and boxes[first].start - boxes[first - 1].end <= _MAX_JOIN_CHARACTERS:
        between = text[boxes[first - 1].end : boxes[first].start]
        is_joined = _JOIN.fullmatch(between) and not _CONCLUDES_LIST.search(between)
        if not is_joined and not _DELIMITERS.fullmatch(between):
            break
        first -= 1
    return boxes[first:]


def find_boxes(text: str) -> list[Span]:
    r"""Return each `\boxed{...}`, `\fbox{...}` or `\boxed 2`, up to the first that is never closed."""
    boxes: list[Span] = []
    position = 0
    while command := _COMMAND.search(text, position):
        content, position = _content(text, command.end())
        if content is None:
            break
        boxes.append(Span(command.start(), position, _innermost(content)))
    return boxes


def _content(text: str, start: int) -> tuple[str | None, int]:
    """The content of a box that begins at `start`, None if it is never closed, and the end of the box."""
    if not text.startswith("{", start):
        unbraced = _UNBRACED.match(text, start)
        content = unbraced.group().rstrip(".,;:") if unbraced else ""
        return content, start + len(content)
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)  # escaped braces do not count
        if depth == 0:
            return text[start + 1 : match.start()].strip(), match.end()
    return None, len(text)


def _innermost(content: str) -> str:
    r"""The content without boxes around all of it: `5` for `\boxed{5}`."""
    while len(content) <= _MAX_BOX_CHARACTERS and (command := _COMMAND.match(content)):
        inner, end = _content(content, command.end())
        if inner is None or end < len(content):
            break
        content = inner
    return content


_SPECIAL_TOKENS = re.compile(r"<\|[a-z_]+\|>|</?s>|<(?:eos|pad|unk|bos|end_of_turn|end_of_text|eot)>|\[/?INST\]")
_HEADING = re.compile(
    r"\W*(?:verification|verify(?: the (?:answer|result))?|check(?:ing)?(?: (?:the|our|my) (?:answer|work|result"
    r"|solution))?|explanation|reasoning|notes?|remarks?|comments?|summary|steps?|justification|proof|discussion|details"
    r"|double[ -]check|sanity check|confirmation|validation|alternative (?:method|solution|approach)"
    r"|(?:step|part|method|approach|case) (?:\d+|[a-z]))\W*",
    re.IGNORECASE,
)
_INTRODUCES = re.compile(
    r"[:=\u2248]|\b(?:is|are|equals?|was|were|be|about|approximately|roughly)\b|'s\b", re.IGNORECASE
)
_NAMES_SUBJECT = re.compile(r"^(?:the|a|an|that)\b|\b(?:is|are|equals)\b|=", re.IGNORECASE)
_COPULA = re.compile(r"\b(?:is|are|equals?|gives?|was|were|be|by)\b|'s\b|[=\u2248]", re.IGNORECASE)
_VERB = re.compile(  # or words that introduce a result
    rf"{_COPULA.pattern}|, (?:so|then|thus|hence|therefore|or|leaving|giving|making)\b|\ba total of\b|\bi\.e\."
    r"|(?<!\bto )\b(?:has|have|had|can|could|will|would|must|should|gets?|got|needs?|needed|takes?|took|answered|makes?"
    r"|made|earns?|earned|pays?|paid|costs?|spends?|spent|reads?|eats?|ate|uses?|used|saves?|saved|received|owes?|owed"
    r"|passes|simplifies to|reduces to|comes to|totals)\b",
    re.IGNORECASE,
)
# As in "30 / 5 = 6 apples in each box".
_RESULT_WITH_WORDS = re.compile(r"[\d\s.$+\-\u2212*/\u00d7\u00f7()]+=\s*[^\s=,]+(?: [a-z]+){2,5}")
_SENTENCE_END = re.compile(r"(?:[.!?]['\")*\]]*(?=\s)(?!\s*=)|\u3002(?=.)|\n)")
_CONCLUDES = re.compile(
    r"(?:therefore|thus|hence|so|consequently|in conclusion|in total|altogether|finally|final answer|"
    r"we (?:find|get|have))\b|\u6240\u4ee5|\u56e0\u6b64|\u6545",
    re.IGNORECASE,
)
_NO_SOLUTION = re.compile(r"(?:\w+, )?there (?:is|are) no (?:real )?solutions?\.", re.IGNORECASE)
_EQUATION_END = re.compile(r"(?! (?:x|times|plus|minus|and|or)\b)(?: [a-z]+){0,3}\s*")
_FINISHED = re.compile(r"(?:[.!\u3002]|\$|\\\]|\\\)|\*\*)[*\s]*$")
_NUMBER = (
    r"(?<![a-zA-Z0-9_.,/^{(])[-+\u2212\u00b1]?(?:\\?[$€£]\s?)?"
    r"(?:\d+(?::\d+)+(?:\s?[aApP]\.?[mM]\b)?|\d+ \d+/\d+|\d*[\u00bc-\u00be\u2153-\u215e]|\d*\u221a\(?\d+\)?(?:/\d+)?"
    r"|(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?|\\[dt]?frac\{-?\d+\}\{\d+\})"
    r"(?:\u03c0(?:/\d+)?|\s?(?:\\?%|€|£|\$|percent\b|°|[a-zA-Z]{1,2}[²³](?!\w)))?"
)
_NUMBER_WORD = rf"(?:{'|'.join(sorted(NUMBER_WORDS))})"
_OTHER_FORM = re.compile(
    r"[\s$]*(?:\\[)\]])?[\s,(]*or (?:"
    rf"(?:(?:\$|\\\()(?P<formula>[^$\n]{{1,60}}?)(?:\$|\\\))|(?P<number>{_NUMBER}))"
    rf"|(?P<words>(?i:{_NUMBER_WORD}\b(?:[ -](?:and|a|{_NUMBER_WORD})\b){{0,12}})(?: [a-z]+){{0,2}}))"
    r"(?=[\s)]*(?:[.,;](?!\d)|\n|$))"
)
_ONE_NUMBER = re.compile(
    rf"(?:{_NUMBER}|\([-+\u2212]?[\d./\u221a\u03c0]+(?:,\s?[-+\u2212]?[\d./\u221a\u03c0]+)+\))(?![a-zA-Z0-9_^\u221a\u03c0]|[.,]\d)"
)
_IN_LIST = re.compile(r"\s*(?:,|,?\s*(?P<word>and|or)\s)\s*(?:[a-z]\s*=\s*)?")
_NUMBER_IN_WORDS = re.compile(
    rf"\b(?!(?:one|a)\b(?![ -]{_NUMBER_WORD}\b)|(?:point|minus|negative)\b){_NUMBER_WORD}"
    rf"(?:[ -](?:and )?(?:a )?{_NUMBER_WORD}\b)*+\b(?!-)",
    re.IGNORECASE,
)
_UNFINISHED_BEFORE = re.compile(r"(?<![a-zA-Z])\d*[a-z]\s?[-+\u2212*/^]\s?$")  # as in 15x - 80
_UNFINISHED_BEHIND = re.compile(r"(?:\s+\w+){1,3}\s+than\s+\W?\d|\s?[-+\u2212*/\u00d7\u00f7x]\s?\d")
_NAME_BEFORE = re.compile(r"(?<!\w)([a-z])\s*=\s*$")
_GIVEN = re.compile(  # before a number that the sentence does not state, as in "5 days to read the 30 pages"
    r"\b(?:in|for|per|every|than|within|out of|the|all|these|those|her|his|their|its|next|last|first|other)\s$",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"(?<=[0-9$)}]),\s+(?:as|which|since|because|so)\b")
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator marks
_NO_STATEMENT = re.compile(
    r"\b(?:I|if|unless|whether|step|part|problem|question|chapter|section|page|line|let|assume|suppose|after|before|until|than|first|next|try"
    r"|guess|maybe|might|could|need to|have to|not|no|never|cannot)\b|n't\b|:$|^\d+[.)]",
    re.IGNORECASE,
)
_ANSWER_HEADING = re.compile(r"[\W_]*(?:(?:the|final|correct) ){0,2}(?:answer|result|solution)[\W_]*", re.IGNORECASE)
# A number with a full stop is the number of a step, so no full stop is allowed here.
_REMARK_BEHIND_NUMBER = re.compile(r"(-?\$?[0-9](?:[0-9.,/]*[0-9])?%?)\s+(?=\(?[A-Z][\w'\u2019-]*[,!:]?\s+\S+\s+\S)")
_GLOSS = re.compile(r"(?P<value>[^()]*\d[^()]*?)\s+\((?P<gloss>[^()]+)\)\.?")
_SUBJECT_AND_VERB = re.compile(r"[A-Z][a-z'\u2019]*\s+(?:[a-zA-Z'\u2019-]+\s+)*[a-z]")
_DIGITS = re.compile(r"\d+(?:[.,]\d+)*")
_CODE = re.compile(r"(`{1,3})([^`]+)\1")
_COUNTED = re.compile(
    r"(?P<number>\**\\?\$?\d+(?:[.,]\d+)*\**)(?: of (?:the|his|her|their|these|those|them))?"
    r"(?P<noun>(?: [a-z'-]+){0,4}?)"
    r" (?:remain(?:s|ed|ing)?|will remain|left|(?:is|are|was|were|will be|have been|has been) (?:still |now |also )?"
    r"(?:left|remaining|needed|required|sold|bought|used|eaten|spent|saved|made|lost|given|available|missing|there|in))"
    r"\b(?P<rest>[a-zA-Z' -]*)[.!]?"
)
_NOT_BEHIND_COUNTED = NUMBER_WORDS | {"and", "but", "or", "then"}
_IS_VALUE = re.compile(r"\d|\\|^\W*[A-Z]\b\W*$")
_HAS_WORDS = re.compile(
    r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?:'[a-z]+)?\s+(?:[^\W\d]{2,})|\b(?:is|are|equals)\b"
    r"|[\u3040-\u30ff\u4e00-\u9fff]{2,}"
)
_SECOND_SENTENCE = re.compile(
    r"(?:[a-z]{3}|\d)[.!?]\s+[A-Z(\d]|\d\s*\n\d|, (?:so|but|therefore|thus|hence)\b|=.*(?:\n|[\u2192\u21d2\u27f9]).*="
)
_TRAILING_CLAUSE = re.compile(  # of a sentence; not one that states a value, such as "because she had 3, so 2 are left"
    rf"(?:,? (?:after (?:\w+ing|the|he|she|they|it)|because)|, not) (?!.*(?:{_COPULA.pattern})\D*\d)(?:[^,]|,\d)*$"
)
_CLAUSE_BEHIND_VALUE = re.compile(  # of a sentence whose verb and value are before it
    rf"(?P<value>(?:{_VERB.pattern})\D{{0,60}}?\d.*?)"
    r"(?:,? (?:if|when|where|compared (?:to|with)|who(?:se)?|(?:at|for) [a-z] ?=|that (?:costs?|was|were|are|has|have)"
    r"|which is (?:about|approximately|also|less|greater|more|fewer|equal|equivalent)) \D*\d[\d.,/:]*\D*"
    r"|, (?:\d+ )?of wh(?:om|ich)\b.*)$",
    re.IGNORECASE,
)
_REMARK_IN_BRACKETS = re.compile(r"(?<=[\s*])\((?=[^()]*[a-z]{2})(?:[^()]|\([^()]*\))*\)")
_CONDITION_IN_BRACKETS = re.compile(r"\*{0,2} \((?:since|because|rounded|for [a-z] \W)[^()]*\)$")
_ASIDE_SENTENCE = re.compile(
    r"\([^()]*\)\W*|Of (?:these|them|those)\b(?!.*(?:=|, so\b|leaving)).*"
    r"|(?:That|This) is (?:about|approximately|roughly) \S*\d\.\d.*"
)
_PICTURE = r"[\s\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]"
_REMARK = re.compile(  # in the last line of a text, unless it concludes something; or pictures at the end
    r"(?:(?<=[.!?)$*]\s)|(?<=\n))\W{0,5}(?:(?:verification|check(?:ing)?|(?:to|we can) (?:check|verify))\b[*:,]"
    r"(?:(?!\b(?:so|therefore|thus|hence|actually|answer|solution)\b)[^\n])*"
    rf"|note(?: that\b|\W?:)(?:[^\n.!?]|\.\d)*\W*)\Z|(?<!{_PICTURE}){_PICTURE}++\Z",
    re.IGNORECASE,
)
_MAX_CHARACTERS = 4000
_MAX_BARE_CHARACTERS = 300
_MAX_LINE_CHARACTERS = 100


_COURTESY_WORDS = re.compile(
    r"I hope|[Ll]et me know|[Ff]eel free|[Hh]ope (?:this|that|it)|[Hh]appy to help|[Gg]ood luck|[Ii]f you (?:need|have)"
    r"|Is there anything|Would you like|Do you (?:want|need|have)|Can I help"
)
_COURTESY = re.compile(rf"(?:(?:^|(?<=[.!?)$*\n]))\s*(?:{_COURTESY_WORDS.pattern})[^.!?\n0-9]{{0,120}}+[.!?]*+)+\s*$")
_MENTIONS_ANSWER = re.compile("a(?:nswer|:|ctually)|\u7b54\u6848", re.IGNORECASE)
_MAX_PHRASES = 8
_STATES = re.compile(
    r"(?<![a-zA-Z])(?:final answer|answer|answer to [^.\n:]{1,60})[\W_]{0,3}"
    r"(?P<verb>is|:|=|would be|must be)"
    r"(?:\s+(?:therefore|thus|then|exactly|simply|just|now|clearly|indeed))?[\s:*]*"
    r"|(?<![a-zA-Z])actually,? it(?:'s| is| should be)\s+(?=\$?-?[0-9][0-9.,/]*\$?\s*(?:\n|\Z))"
    r"|^A:\s*|^[#* \t]{0,10}(?:final )?answer[*:]*\n\s*|" + "\u7b54\u6848" + r"(?:\u662f|\u4e3a)?[\s:\uff1a*]*",
    re.IGNORECASE | re.MULTILINE,
)
_CONDITION = re.compile(
    r"\b(?:if|whether|unless|suppose|assume|never|what|wrong|incorrect|doubt|why|false|thought|check|verify|confirm)\b|\bno\s*$|\bnot\b(?!\s*,)"
    r"|n't\b",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"(?:not|never|neither|unknown|unclear|wrong|incorrect|either)\b", re.IGNORECASE)
_SENTENCE_BREAK = re.compile(r"[.!?;\u3002\n]")
_CHANGED_BEHIND = re.compile(
    r"[\s$*]*(?:more than|less than|fewer than|squared|cubed|times|plus|minus|factorial|divided|or)\b", re.IGNORECASE
)
_MARKUP = re.compile(r"\\[()\[\]]|[\s$\\\"'.{}*]")
_FORMULA = re.compile(
    # Longer formulas are not answers, and searching for the end of each would take quadratic time. A dollar sign with a
    # space before it or a digit behind it closes no formula: "$92 - $72 = $20".
    r"(?:\$\$(.{1,300}?)\$\$|\\\[(.{1,300}?)\\\]|\\\((.{1,300}?)\\\)"
    r"|\$(?![?!.\s])((?:[^$\\\n]|\\.){0,300}(?:[^$\\\s]|\\.))\$(?!\d)|\$ ((?:[^$\\\n]|\\.){1,300}) \$(?!\d)"
    r"|(?<![\\\w])\[ ([^\[\]\n]{1,300}) \])",  # what is left of \[ 5 \] where backslashes got lost
    re.DOTALL,
)
_DECLARED_FORMS = {
    AnswerPolicy.BOXED: (_boxed,),
    AnswerPolicy.MARKED: (_marked,),
    AnswerPolicy.DECLARED: (_marked, _boxed, _tagged),
}
"""If two functions find answers at the same place, the first counts."""


# Answers in sentences.


def _stated_after(text: str, declared: FinalAnswer) -> FinalAnswer | None:
    """Another answer that a phrase such as "The answer is" states after the declared one; None without one."""
    start = max(declared.place, len(text) - _MAX_CHARACTERS)
    ending = _without_courtesy(_before_special_tokens(text[start:].replace("</answer>", "\n")).rstrip())
    for phrase in _phrases(ending):
        if "box" in ending[phrase.start() :] or _MARKER in ending[phrase.start() :]:
            break  # the declared answer itself, or one before it
        answer = _after_phrase(ending, phrase)
        if answer and _IS_VALUE.search(answer):  # not "Our answer is correct"
            plain = _MARKUP.sub("", answer)
            is_same = any(plain in _MARKUP.sub("", each) for each in (declared.text, *declared.others))
            return None if is_same else FinalAnswer(answer, place=start + phrase.start())
    return None


def _stated(text: str, *, last_sentence: bool) -> FinalAnswer | None:
    """The answer in the last sentence that states one, or else all of a bare text, or the conclusion at its end."""
    # Only the end is searched: a model's text may be long and made to be slow to search.
    ending = _before_special_tokens(text).strip()[-_MAX_CHARACTERS:]
    ending = _without_courtesy(_CALCULATION.sub("", ending))
    if phrases := _phrases(ending):
        answer = next(filter(None, (_after_phrase(ending, phrase) for phrase in phrases)), None)
    else:
        answer = _bare(ending) or _concluded(ending, last_sentence=last_sentence)
    return FinalAnswer(answer, place=max(0, text.rfind(answer))) if answer else None


def _before_special_tokens(text: str) -> str:
    return _SPECIAL_TOKENS.split(text, maxsplit=1)[0]


def _without_courtesy(text: str) -> str:
    """The text without polite sentences at its end, such as "I hope this helps"."""
    if not _COURTESY_WORDS.search(text, max(0, len(text) - 200)):  # a quick test, since most texts have none
        return text
    return _COURTESY.sub("", text).rstrip()


def _phrases(text: str) -> list[re.Match[str]]:
    """The last few phrases that state an answer, such as "The answer is", beginning with the last one."""
    if not _MENTIONS_ANSWER.search(text):  # a quick test
        return []
    return list(_STATES.finditer(text))[-_MAX_PHRASES:][::-1]


def _after_phrase(text: str, phrase: re.Match[str]) -> str | None:
    """The answer after a phrase such as "The answer is"; None after a question, a condition or a denial."""
    answer, end = _until_end(text, phrase.end())
    after = text[end:]
    before = text[max(0, phrase.start() - _MAX_LINE_CHARACTERS) : phrase.start()]
    sentence_before = _SENTENCE_BREAK.split(before)[-1]
    if answer.endswith("?") or after.lstrip("*\"' ").startswith("?"):
        return None
    if _CONDITION.search(sentence_before) or _DENIAL.match(answer):
        return None
    if remark := _REMARK_BEHIND_NUMBER.match(answer):
        return remark[1]
    is_calculation = _RESULT_WITH_WORDS.fullmatch(answer)
    if not (is_calculation or _HAS_WORDS.match(answer)) or not re.search("[0-9$]", answer):
        return answer or None
    # "Final Answer: The area is 12" names its subject and gives a value; "The answer is in chapter 12" gives none.
    if phrase["verb"] != ":" and not is_calculation and not _NAMES_SUBJECT.search(answer):
        return None
    value = _last_value(answer)
    return value.content + scale_behind(answer[value.end :]) if value else None


def _until_end(text: str, start: int) -> tuple[str, int]:
    """The text from `start` to the end of its sentence or of the formula that begins there, and that end."""
    formula = _FORMULA.match(text, start) if text.startswith(("$", "\\", "["), start) else None
    # The formula is the whole answer unless a word or another formula follows: "$5$ apples", "$3$, $4$".
    if formula and not re.match(r"\s*[^\W\d_]|\s*[$\\]", text[formula.end() :].lstrip(".,")):
        return _formula_content(formula), formula.end()
    end = _SENTENCE_END.search(text, start)
    sentence = _ASIDE.split(text[start : end.start() if end else len(text)])[0]
    answer = _CONDITION_IN_BRACKETS.sub("", sentence.strip().rstrip(".!\u3002"))
    return answer.strip("\"'* "), start + len(sentence)


def _bare(text: str) -> str | None:
    """The whole text if it is only an answer, without a sentence around it."""
    if not text or len(text) > _MAX_BARE_CHARACTERS or "\n\n" in text:
        return None
    if re.search(r"[\d=]", text) and _SECOND_SENTENCE.search(text):  # "3 * 4 = 12. She has 12 apples."
        return None
    formula = _FORMULA.search(text)
    if formula and re.search(r"[^\W\d_]{3,}", text[: formula.start()]):  # a label, as in "Answer $9$"
        return None
    has_words = _HAS_WORDS.search(_FORMULA.sub(" ", text))
    is_number_with_unit = text[0].isdigit() and split_unit(text)[1] is not None
    return text if is_number_with_unit or not has_words else None


def _concluded(text: str, *, last_sentence: bool) -> str | None:
    """The value in the last sentence, if that is finished and says "therefore" or the like, or is the only sentence."""
    text = _REMARK.sub("", text)
    # A full stop inside a formula does not end a sentence.
    ends = [match.end() for match in _SENTENCE_END.finditer(_without_formulas(text))]
    parts = (text[start:end].strip() for start, end in pairwise([0, *ends, len(text)]))
    sentences = [part for part in parts if part]
    if len(sentences) > 1 and _ASIDE_SENTENCE.fullmatch(sentences[-1]):
        sentences.pop()
    if not sentences or "?" in sentences[-1]:
        return None
    last = sentences[-1]
    if len(sentences) > 1 and _FORMULA.fullmatch(last):  # a formula on a separate line ends the sentence before it
        last = f"{sentences[-2]} {last}"
    if last_sentence and _NO_SOLUTION.fullmatch(last):
        return "no solution"
    value = _last_value(last) or (_words(last) if last_sentence else None)
    if value is None:
        return None
    is_line = len(sentences) > 1 and text[: -len(last)].endswith("\n")
    begins = last[: value.start].rstrip().endswith(("=", ":")) or (is_line and not value.start)
    is_result = begins and _EQUATION_END.fullmatch(last, value.end)
    if not (_FINISHED.search(last) or value.end == len(last) or is_result):
        return None
    answer = value.content + scale_behind(last[value.end :])
    if last_sentence and (_FINISHED.search(last) or is_result):
        return answer
    is_only = len(sentences) == 1 or (len(text) <= _MAX_LINE_CHARACTERS and "\n" not in text)
    concludes = _CONCLUDES.search(last) or (is_only and (_FORMULA.search(last) or _INTRODUCES.search(last)))
    return answer if concludes else None


def _last_value(sentence: str) -> Span | None:
    """The formula, number or list after the last verb of a sentence, such as "is", or else the last one.

    A number that the sentence only mentions, as in "for 4 days", counts only if there is no other.
    """
    sentence = _main_clause(sentence)
    words = _without_formulas(sentence)
    values = [Span(*match.span(), _formula_content(match)) for match in _FORMULA.finditer(sentence)]
    values += [Span(*match.span(), match.group().strip()) for match in _ONE_NUMBER.finditer(words)]
    values = _with_lists(sentence, sorted(values))
    if not values:
        return None
    bold = [value for value in values if sentence.count("**", 0, value.start) % 2]
    if len(bold) == 1:  # "She earned **$10** for 50 minutes."
        return bold[0]
    verbs = [match.end() for match in _VERB.finditer(words) if match.end() < values[-1].end]
    after = [value for value in values if verbs and value.end > verbs[-1]]
    stated = [value for value in after or values if not _GIVEN.search(words, max(0, value.start - 10), value.start)]
    value = min(stated) if after and stated else max(stated or values)
    if _UNFINISHED_BEHIND.match(sentence, value.end) or _UNFINISHED_BEFORE.search(sentence[: value.start][-10:]):
        return None
    for other in values:  # "so $2x = 4$ and $x = 2$"
        if "=" in value.content and "=" in other.content and _IN_LIST.fullmatch(sentence, value.end, other.start):
            value = other
    if value.content.count("=") > 1 and not re.search(r"[,;<>]|\\text|\b(?:or|and)\b", value.content):  # a calculation
        value = value._replace(content=value.content.rpartition("=")[2].strip())
    return value if value.content else None


def _main_clause(sentence: str) -> str:
    """The sentence up to a clause behind its value, and with spaces instead of remarks in brackets."""
    if len(sentence) > _MAX_BARE_CHARACTERS:  # the searches may take quadratic time
        return sentence
    plain = sentence
    for remark in _REMARK_IN_BRACKETS.finditer(_without_formulas(sentence)):
        plain = f"{plain[: remark.start()]}{' ' * len(remark[0])}{plain[remark.end() :]}"
    sentence = plain if re.search(r"\d", plain) else sentence
    if behind := _CLAUSE_BEHIND_VALUE.search(sentence):
        sentence = sentence[: behind.end("value")]
    clause = _TRAILING_CLAUSE.search(sentence)
    return sentence[: clause.start()] if clause and re.search(r"\d", sentence[: clause.start()]) else sentence


def _with_lists(sentence: str, values: list[Span]) -> list[Span]:
    """The values of a sentence in order, with those of a list such as "$5$ and $-2$" or "x = 5 or x = -2" as one."""
    joined: list[Span] = []
    for value in values:
        before = joined[-1] if joined else value
        between = _IN_LIST.fullmatch(sentence, before.end, value.start)
        name = _name_of(value, sentence)
        if between and (name == _name_of(before, sentence) or (between["word"] and not name)):
            joined[-1] = Span(before.start, value.end, f"{before.content}, {value.content}")
        else:
            joined.append(value)
    return joined


def _name_of(value: Span, sentence: str) -> str | None:
    """The left side of the equation that a value is or ends; None if it does neither."""
    name, equals, _ = value.content.partition("=")
    before = _NAME_BEFORE.search(sentence, max(0, value.start - 10), value.start)
    return name.strip() if equals else before and before[1]


def _words(sentence: str) -> Span | None:
    """The first number after the last verb of a sentence that is written in words, such as "two"; None without one."""
    if len(sentence) > _MAX_BARE_CHARACTERS:
        return None
    numbers = list(_NUMBER_IN_WORDS.finditer(sentence))
    verbs = [match.end() for match in _VERB.finditer(sentence) if numbers and match.end() < numbers[-1].start()]
    match = next((each for each in numbers if verbs and each.start() > verbs[-1]), None)
    return Span(*match.span(), match.group()) if match else None


def _formula_content(match: re.Match[str]) -> str:
    """The formula between the delimiters of a match of _FORMULA, which has a group for each kind of delimiters."""
    return next(group for group in match.groups() if group is not None).strip()


_LAST_NUMBER = re.compile(r"(?<![\w.{^])[-\u2212]?(?:\\?[$€£])?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?")


def last_formula_or_number(text: str, *, formulas: bool) -> str | None:
    """Return the last number of a text or, with `formulas`, its last formula if no number follows it; None without."""
    ending = _before_special_tokens(text)[-_MAX_CHARACTERS:]
    # A "formula" with words is the text between two amounts in dollars.
    matches = [match for match in _FORMULA.finditer(ending) if formulas and not _HAS_WORDS.search(match.group())]
    numbers: list[str] = _LAST_NUMBER.findall(ending, matches[-1].end() if matches else 0)
    if numbers:
        return numbers[-1]
    return _formula_content(matches[-1]) or None if matches else None


def _without_formulas(text: str) -> str:
    """The text with each character of a formula replaced by a zero byte."""
    return _FORMULA.sub(lambda match: "\x00" * len(match.group()), text)
