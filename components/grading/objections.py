r"""Words around an answer that take it back: negations, conditions and doubts before it, corrections behind it.

"The answer is not 5" has no answer, nor has "5. No, 6". What a text may say besides is open-ended, so these rules list
what takes an answer back. A negation counts where it governs the answer, that is, where only words such as "is the
correct answer" stand between the two: "the number that is not prime is 5" denies nothing.

Most texts have no word of most rules, and to look for words is much faster than to search for patterns: a rule names
words of which each text that it applies to has one.
"""

import re

from components.grading.quantities import SMALL_NUMBERS
from components.grading.reasons import Reason


def objection(before: str, after: str, answer: str = "") -> str:
    """Return the reason why the words around an answer take it back; empty where they do not."""
    before = before[-_MAX_BEFORE:]
    if any(mark in before for mark in _HIDING) and _HIDDEN.search(before):
        return Reason.HIDDEN
    before = before.casefold()
    clause = before[to_clause.end() :] if (to_clause := _TO_CLAUSE.match(before)) else before
    words = _words_of(clause)
    is_denied = any(rule.applies(words, clause) for rule in (_DENIED_BEFORE, _NO_NEAR, _ALL_BUT))
    if is_denied or _MIGHT.applies(words, before) or is_disclaimed(before):
        return Reason.DENIED
    if _GOVERNED.applies(words, clause) or _OF_ANSWER.applies(words, clause):
        return Reason.CHANGED
    if answer.endswith(("%", "percent")) and _OF_NUMBER.match(after):
        return Reason.CHANGED
    if not _IS_SAID.search(after):
        return ""
    return _behind(after[: _MAX_LATER // 2] + " " + after[_MAX_LATER // 2 :][-_MAX_LATER // 2 :])


def is_disclaimed(before: str) -> bool:
    """Tell whether the words directly before an answer say that it is not known: "I have no idea. "."""
    end = folded(before[-_MAX_DISCLAIMER:])
    return _DISCLAIMED.applies(set(_WORD.findall(end)), end)


def taken_back(later: str) -> str:
    """Return the reason why what is written after an answer takes it back; empty where it does not."""
    words = _words_of(later)
    if _ANOTHER_LATER.applies(words, later) or _COULD_BE.applies(words, later):
        return Reason.SEVERAL_ANSWERS
    is_taken_back = any(rule.applies(words, later) for rule in (_TAKEN_BACK, _DENIED_LATER, _SHOULD_BE))
    return Reason.TAKEN_BACK if is_taken_back else ""


def _behind(after: str) -> str:
    if "\\" in after:
        after = _TEXT.sub(" ", after[:_MAX_CLAUSE]) + after[_MAX_CLAUSE:]
    after = _CLOSING.sub(" ", after)
    end = _END.search(after)
    clause = after[: end.start() + 1 if end else len(after)][:_MAX_CLAUSE]
    if _DOUBTED_BEHIND.match(clause):
        return Reason.DENIED
    if _DENIED_BEHIND.match(clause) or _KNOWN_WRONG.match(clause):
        return Reason.DENIED_BEHIND
    if _CHANGED_BEHIND.match(clause):
        return Reason.CHANGED
    return Reason.SEVERAL_ANSWERS if _MORE_BEHIND.match(clause) else taken_back(after)


_MAX_BEFORE = 300
_MAX_DISCLAIMER = 80
_MAX_LATER = 4000
_MAX_CLAUSE = 300
_WORD = re.compile("hmm|[a-z]+")
_LETTERS_I = str.maketrans("\u0130\u0131", "ii")  # casefold() leaves them alone


def folded(text: str) -> str:
    """Return a text in which letters are equal that are equal to patterns that ignore case."""
    return (text if text.isascii() else text.translate(_LETTERS_I)).casefold()


def _words_of(text: str) -> set[str]:
    """The words of a text, folded; "isn't" is two of them, "isn" and "t"."""
    return set(_WORD.findall(folded(text)))


def _phrases(text: str) -> tuple[str, ...]:
    """The phrases between the commas of a text."""
    return tuple(" ".join(phrase.split()) for phrase in text.split(","))


def _one_of(*lists: tuple[str, ...]) -> str:
    return "|".join(phrase for phrases in lists for phrase in phrases)


class _Rule:
    """A pattern, and groups of words: a text that it matches has a word of each."""

    def __init__(self, pattern: str, *groups: tuple[str, ...], ignores_case: bool = False) -> None:
        """Compile the pattern; of phrases the groups have the longest word, as the least common one."""
        self.pattern = re.compile(pattern, re.IGNORECASE if ignores_case else re.NOFLAG)
        self.groups = [{max(_WORD.findall(phrase), key=len) for phrase in group} for group in groups]

    def applies(self, words: set[str], text: str) -> bool:
        """Tell whether the pattern is in a text, which has these words."""
        return not any(map(words.isdisjoint, self.groups)) and self.pattern.search(text) is not None


# Parts of patterns.

_VALUE = (
    r"(?:[($\s]|\\[(\[]|\\\$|\\text\s*\{|\*\*)*+[-\u2212+]?\s*(?:\d"
    r"|\\(?:[dt]?frac|boxed|fbox|sqrt|pi|infty|binom|sin|cos|tan|ln|log)(?![a-z])|[a-z]\s*=\s*[-\d\\]|\(?[A-H]\)"
    rf"|(?:{'|'.join(SMALL_NUMBERS)}|hundred|thousand|million|a dozen)\b)"
)
_FILLERS = _phrases(
    """is, are, was, were, am, be, been, being, equal, equals, to, the, an, a, that, this, it, its, we, you, i, one,
    they, anyone, have, has, had, get, got, gets, say, says, said, think, thought, believe, believed, claim, claimed,
    mean, means, find, conclude, see, true, case, answer, answers, value, values, result, results, solution, solutions,
    correct, right, final, actual, real, exactly, precisely, any, necessarily, really, actually, simply, just, even,
    always, quite, in, fact, as, for, problem, question, our, your, my, so, then, here, should, would, could, can,
    must, will, may, might, do, does, did, sure, certain, convinced, likely, mathematically, definitely, certainly,
    like, given, by, following, expected, wanted, output, outcome, number, of, there, how, many"""
)
_FILLER = (
    rf"(?:\b(?:{_one_of(_FILLERS)})\b"
    r"|\b[b-hj-zB-Z]\b|[\s$=:,*\"'`({\[\\&_\u2018\u2019\u201c\u201d-])*+"
)
_WRONG = (
    r"(?:wrong|incorrect|false|untrue|impossible|mistaken|erroneous|invalid|inadmissible|excluded|rejected"
    r"|extraneous|absurd|nonsense|bogus|unlikely|doubtful|questionable|off|ruled out|out of the question"
    r"|(?:too|way too) \w+|(?:(?:only|just|merely|simply) )?(?:a|an|my|the|our)"
    r"(?: \w+)? ?(?:mistake|error|guess|lie|joke|typo|trap|bluff|red herring|wrong \w+|incorrect \w+))"
)
_DENIED = (
    rf"(?:(?:definitely|certainly|clearly|obviously|probably|simply|actually|really|also|still|thus|therefore"
    rf"|of course|in fact)\s+)*{_WRONG}\b"
)
_OBJECT = (
    r"(?:\s+(?:be|been|really|actually|quite|at all|even|exactly|necessarily))*\s*(?:(?:the|a|an|my"
    r"|our)\s+)?(?:(?:right|correct|final|actual|real|true|valid)\s+)*"
    r"(?:answer|correct|right|true|it|possible|valid|solution|root|divide|candidate|option|so|the case|allowed"
    r"|acceptable|accepted|what|equal|value|result|hold|work|count|fit|satisfy|final|accurate|me|sure|certain|$)"
    r"(?:\b|$)"
)
_COPULA = (
    r"(?:is|are|was|were|would be|will be|must be|should be|seems(?: to be)?|looks|appears(?: to be)?"
    r"|turns out to be|has to be|can be|could be|might be|may be|be|'s)"
)
_VERBS = _phrases("is, are, was, were, would, will, must, should, can, could, may, might, does, do, did, has, need")
_NEGATED_COPULA = (
    rf"(?:(?:{_one_of(_VERBS)})\s*(?:n['\u2019]t|not|\s+never|\s+no longer|\s+hardly)"
    r"|cannot|can['\u2019]t|won['\u2019]t)"
)
_SUBJECT = (
    r"(?:which|that|this|it|but|and|though|although|however|yet|so|answer|value|result|the|last|above|one|here"
    r"|guess|all)"
)

# Before an answer. These patterns are for casefolded text: ignoring case takes three times as long.

_HIDING = ("~~", "<s>", "<del>", "<strike>", "<!--", "\u2717", "\u2718", "\u274c", "%")
_STRIKE_TAG = r"<(?:s|del|strike)>"
STRUCK_OUT = re.compile(rf"~~[^~]+~~|{_STRIKE_TAG}")
"""Text that is struck out, in Markdown or HTML."""
_HIDDEN = re.compile(rf"(?:~~|{_STRIKE_TAG}|<!--|[\u2717\u2718\u274c])[\s$\\(\[]*$|(?:^|\s)%[^\n]*$")
_TO_CLAUSE = re.compile(r".*[.!?;\u3002](?=\s|$)", re.DOTALL)
_NEGATING = _phrases("not, t, cannot, never, no longer, hardly, scarcely")
_NOT = r"(?:\bnot|n['\u2019]t|\bcannot|\bnever|\bno longer|\bhardly|\bscarcely)"
_DENYING = _phrases(
    """neither, nor, nothing, nobody, no one, none, no, wrong, wrongly, incorrect, incorrectly, false, falsely, untrue,
    mistaken, mistakenly, mistake, mistakes, error, errors, erroneous, erroneously, bogus, doubt, deny, denies, reject,
    rejects, rejected, exclude, excludes, excluding, rule out, rules out, ruled out, except, anything but, all but,
    everything but, other than, rather than, instead of, unlike, different from, differs from, differ from, far from,
    distinct from, contrary to, impossible, ignore, ignoring, forget, discard, discarded, avoid, unequal to, suppose,
    supposing, supposed, assume, assuming, imagine, pretend, unless, whether, lest, maybe,
    perhaps, possibly, probably, presumably, guess, guessing, guessed, unsure, unclear"""
)
_DENIED_BEFORE = _Rule(
    rf"(?:{_NOT}|\b(?:{_one_of(_DENYING)}|(?<!only )if(?! and only))\b){_FILLER}$",
    _NEGATING + _DENYING + _phrases("if"),
)
_NO_NEAR = _Rule(r"\bno\s*$", _phrases("no"))
_ALL_BUT = _Rule(
    r"\b(?:any|every|each|all)(?: (?:of|the|other|possible|real|positive|whole))*"
    r" (?:number|value|integer|answer|choice|option|solution|result|root|candidate)s? (?:but|besides|save|apart from)"
    r"(?: the| is| to)*[\s$:(\\\[*}]*$",
    _phrases("any, every, each, all"),
    _phrases("but, besides, save, apart"),
)
_DISCLAIMING = _phrases(
    """who knows, hard to say, hard to tell, hard to know, it is hard to say, it's hard to say, i give up, giving up,
    dunno, i dunno, idk, i made this up, i made it up, i made that up, i just made this up, i just made it up,
    beats me, i am stuck, i'm stuck, i am lost, i'm lost, i am clueless, i'm clueless, i am stumped, i'm stumped"""
)
_DO_NOT = r"(?:do not|don['\u2019]?t|did not|didn['\u2019]?t)"
_CANNOT = r"(?:cannot|can['\u2019]?t|can not|could not|couldn['\u2019]?t|am unable to)"
_SOLVING = _phrases("tell, say, see, solve, figure, answer, do, understand, remember, compute, work, decide")
_BEFORE_ANSWER = _phrases(
    """but, though, anyway, well, sorry, honestly, how, what, solve, doing, m, out, yet, at, all, let, us, s, ll, d, go,
    going, with, put, try, pick, choose, now, maybe, perhaps"""
)
_DISCLAIMED = _Rule(
    # At the beginning of a clause: "the value that I do not know is 5" is none.
    r"(?:(?:^|[.!?,;:({\n\u2014\u2013]|\b(?:but|and|so|because|since|as|well|sorry|honestly|actually))[\s*\"'(_$]*"
    rf"(?:(?:i|we)(?: really| honestly| simply| just| still| truly| actually)? {_DO_NOT} know|{_one_of(_DISCLAIMING)}"
    rf"|i (?:{_CANNOT}|{_DO_NOT}) (?:{_one_of(_SOLVING)})"
    r"|i(?: a|['\u2019])m (?:unsure|not (?:really |at all |quite |so |very )?(?:sure|certain))"
    r"|(?:(?:just|a|some|picked|chosen) )*(?:at random|random (?:number|guess|choice|pick|answer|value))\s*[:,.;])"
    r"|\bno (?:idea|clue)|(?:\bnot|n['\u2019]t) (?:have |got )?(?:an?|any|the \w+) (?:idea|clue)"
    r"|\b(?:just|only) (?:a )?guess(?:ing)?|\b(?:wild|random|lucky) guess)"
    rf"(?:\b(?:{_one_of(_FILLERS, _BEFORE_ANSWER)})\b"
    r"|[\s$=:;,.!?*\"'`(){}\[\\&_\u2018\u2019\u201c\u201d\u2013\u2014-])*+$",
    _DISCLAIMING + _phrases("not, t, dont, didnt, cannot, cant, couldnt, unable, unsure, no, random, guess, guessing"),
    _DISCLAIMING + _SOLVING + _phrases("know, sure, unsure, certain, random, idea, clue, guess, guessing"),
)
_MIGHT = _Rule(
    r"\b(?:could|might|may)\s+(?:(?:also|well|just|as|still|perhaps|possibly|instead|very)\s+)*(?:be|equal|have been)"
    r"(?:\s+(?:the|answer|equal|to|either))*[\s$:(\\\[*]*$|(?:^|[.!?;]\s*)\W*(?:or|else|otherwise)\b" + _FILLER + "$",
    _phrases("could, might, may, or, else, otherwise"),
)
_GOVERNING = _phrases(
    """below, above, under, exceed, exceeds, exceeding, twice, thrice, double, triple, half, minus, negative, plus,
    times, divided by, multiplied by, divisible by, close to, near, squared, next to, out of, anywhere from,
    up to but not including, either, not equal to, opposite of, opposite:, reciprocal of, inverse of, ten to the,
    to the power, to the power of, base"""
)
_PARTS_OF = _phrases(
    """third, quarter, fourth, fifth, tenth, half, percent, multiple, factor, divisor, power, fraction, part, root"""
)
_VALUES_OF = _phrases(
    """square, cube, reciprocal, inverse, opposite, negative, negation, complement, factorial, half, double, triple,
    third, quarter, logarithm, log, absolute value, successor, predecessor"""
)
_GOVERNED = _Rule(
    rf"\b(?:{_one_of(_GOVERNING)}|(?:{_one_of(_PARTS_OF)}) of|the (?:{_one_of(_VALUES_OF)}) of"
    r"|(?:less|more|greater|fewer|larger|smaller|bigger|lower|higher|other|else|farther|further) than(?: or)?"
    r"(?: equal to)?|(?:square|cube|cubic|fourth|\w+th) root of|between [^.]{1,20} and)"
    r"(?:\s+(?:be|equal|equal to|of|the|number|value|answer|a|an|exactly|only|just))*[\s$(\\\[*:]*$",
    _GOVERNING + _PARTS_OF + _VALUES_OF + _phrases("than, root, between"),
)
_BEFORE_RESULT = _phrases("twice, thrice, half, double, triple, times, plus, minus, than, negative")
_RESULT_OF = _phrases(
    """square, cube, root, opposite, reciprocal, inverse, negation, negative, half, double, third, quarter, percent,
    logarithm, factorial, multiple, complement, sum, product, difference"""
)
_BEHIND_RESULT = _phrases(
    """plus, minus, times, squared, cubed, doubled, halved, tripled, divided, multiplied, over, less, increased,
    decreased, reduced, mod, modulo, rounded, negated, inverted"""
)
_OF_ANSWER = _Rule(
    rf"\b(?:{_one_of(_BEFORE_RESULT)}|(?:{_one_of(_RESULT_OF)}) of)"
    r"(?: the| our| my| this| of)*(?: final| right| correct)* (?:answer|result)\b"
    rf"|\b(?:answer|result) (?:{_one_of(_BEHIND_RESULT)})\b",
    _phrases("answer, result"),
    _BEFORE_RESULT + _RESULT_OF + _BEHIND_RESULT,
    ignores_case=True,
)
_OF_NUMBER = re.compile(rf"^[\s$]*of\s+{_VALUE}")

# Directly behind an answer.

_IS_SAID = re.compile(r"[^\W_]|\?")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm)\s*\{")
_CLOSING = re.compile(r"^(?:[\s$*}]|\\[)\]])+")
_END = re.compile(r"[.!?](?:[\s$*\"')\]]|\\[)\]]|$)|\n")
_DOUBTED_BEHIND = re.compile(
    r"^[\s*$)\]}\\]*\?|^\W*(?:maybe|perhaps|possibly|probably|presumably|i guess|or not)\b", re.IGNORECASE
)
_DENIED_BEHIND = re.compile(
    rf"^\W*+(?:{_SUBJECT}\b\W++){{0,8}}?(?:{_COPULA}\s+{_DENIED}|{_NEGATED_COPULA}{_OBJECT}"
    rf"|{_COPULA}\s+(?:not|never){_OBJECT}|{_NEGATED_COPULA}\s+(?:be\s+)?$|fails?\b"
    r"|(?:wrong|incorrect|false|not)\s*[.!?)*\n]|(?:wrong|incorrect|false)\s*$|not\s*$|isn['\u2019]t\b"
    rf"|{_COPULA}\s+no\s+(?:solution|answer|root|option|candidate)\b"
    r"|(?:might|may|could)\s+(?:\w+\s+)?be\s+(?:the\s+)?(?:answer|right|correct|it|true)\b)",
    re.IGNORECASE,
)
_KNOWN_WRONG = re.compile(r"^\W*which\b[^.\n]{0,40}\b(?:wrong|incorrect|false|mistaken)\b", re.IGNORECASE)
_CHANGED_BEHIND = re.compile(
    r"^\W{0,6}(?:(?:times|over|plus|minus|(?:reduc|increas|decreas|lower|diminish|rais|shorten)ed by"
    r"|multiplied by|divided by|modulo|mod|to the power(?: of)?|raised to(?: the)?|point|remainder|out of|to the|less"
    rf"|upon|percent of|degrees and|dollars and|minutes and|feet and|hours and)(?:\s+the)?{_VALUE}"
    r"|(?:squared|cubed|factorial|doubled|tripled|halved|quadrupled|inverted|negated|reversed|plus or minus"
    r"|give or take|and a (?:half|quarter|third|bit)|and change"
    r"|and (?:one|two|three) (?:half|halves|thirds?|quarters?|fifths?)"
    r"|or (?:something|another|anything|other|some|else|more|less|so|fewer|thereabouts|greater|higher|lower|above"
    r"|below|under|over|not)|at (?:least|most)|ish|to the (?:power|nth|first|second|third|fourth|fifth)|raised to"
    r"|(?:th|nd|rd|st) (?:root|power|part)|if|unless|only if|whenever|provided|assuming)\b"
    r"|(?:more|less|fewer|greater|smaller|larger|bigger|higher|lower)(?:\s+\w+)?\s+than\s+"
    rf"(?:{_VALUE}|that\b|this\b|it\b))",
    re.IGNORECASE,
)
_MORE_BEHIND = re.compile(
    rf"^\W*(?:or|either|and/or|vs\.?|versus)\s+(?:\w+\s+){{0,4}}?{_VALUE}"
    rf"|^\W*(?:,|and|&|;|/|\||as well as|and also|or also)\s*{_VALUE}[^a-zA-Z]*$"
    rf"|^\s*(?:\\(?:to|(?:long)?rightarrow|mapsto|leadsto)(?![a-z])|-+>|\u2192)[\s$]*{_VALUE}"
    rf"|^\s*(?:to|through)\s+{_VALUE}|^\W{{0,4}}(?:,|and)\s*{_VALUE}[\d,.\s$]*(?:[.!?]|$)|^\W*(?:or|,)\s+[A-H]\b\W*$",
    re.IGNORECASE,
)

# Anywhere behind an answer.

_RETRACTIONS = _phrases(
    """actually, wait, oops, ops, whoops, hmm+, hm, sorry, correction, corrected, scratch that, scratch this, scratch
    it, second thought, second thoughts, on second thought, on second thoughts, upon second thought, upon second
    thoughts, or rather, i mean, i meant, just kidding, kidding, never mind, nevermind, strike that, jk, lol, i lied,
    or not, my mistake, my bad, my error, hold on, apologies, i apologise, i apologize, i take that back, i take it
    back, i take this back, not really, not quite, not so fast, ignore that, ignore this, ignore it, forget that,
    forget this, forget it, i made, i have made, i misread, i miscounted, i miscalculated, i forgot, i do not know, i
    don't know, i am guessing, i was guessing, erratum"""
)
_UNSURE = _phrases("wrong, mistaken, not sure, unsure")
_TAKEN_BACK = _Rule(
    r"(?:^|[.!?;:,(\n\u2014\u2013\u2026]|\s-|--)[\s*\"'(_]{0,6}(?:(?:but|oh|ah|uh|um|and|so|well|or)[,\s]{1,4}){0,4}"
    rf"(?:{_one_of(_RETRACTIONS)}|rather[,:]|there (?:is|was) an? (?:mistake|error)"
    rf"|i(?:'m| 'm| am| was) (?:{_one_of(_UNSURE)})|no(?:pe)?\s*(?:[,.:;!\u2014-]|it|that|this|wait|the answer|i)|not!"
    r"|no\s*$|wrong(?:ly)?\s*(?:[,.:!)]|$)|incorrect\s*(?:[,.:!)]|$)|false\s*(?:[.:!)]|$)|correct(?:ing|ed)?\s*:"
    r"|edit\s*:|update\s*:)(?:\b|(?<=\W)|$)",
    _RETRACTIONS
    + _UNSURE
    + tuple(no + more for no in ("no", "nope") for more in ("", "it", "that", "this", "wait", "the", "i"))
    + _phrases("rather, mistake, error, not, wrongly, incorrect, false, correct, correcting, edit, update"),
    ignores_case=True,
)
_FALSE = _phrases("wrong, incorrect, false, mistaken, erroneous")
_DENIED_LATER = _Rule(
    r"(?<!if )\b(?:that|this|it|which|above|answer|value|result|guess|solution|one)\b\s*"
    rf"(?:{_COPULA}\s+(?:(?:definitely|certainly|clearly|obviously|probably|simply|actually|really|also|of course"
    rf"|in fact|just)\s+)*(?:(?:{_one_of(_FALSE)})(?:ly)?\b|a (?:lie|joke|guess|trap|bluff)\b"
    r"|(?:(?:a|an|my|our) )?(?:mistake|error|typo)\s*[.!\n])"
    rf"|(?:{_NEGATED_COPULA}(?:\s+be)?|{_COPULA}\s+(?:not|never))\s+(?:the\s+|a\s+)?"
    r"(?:right|correct|final|actual|real|true|valid)?\s*(?:answer|correct|right|true|it|so|valid)\b)",
    _NEGATING
    + tuple(f"{verb}not" for verb in _VERBS)
    + tuple(f"{word}{ending}" for word in _FALSE for ending in ("", "ly"))
    + _phrases("lie, joke, guess, trap, bluff, mistake, error, typo"),
    ignores_case=True,
)
_SHOULD_BE = _Rule(
    r"\b(?:should|must|ought to)\s+(?:have been|really be|rather be|actually be|instead be|be instead)\b",
    _phrases("should, must, ought to"),
    _phrases("be, been"),
    ignores_case=True,
)
_ANOTHER_LATER = _Rule(
    r"(?:^|[.!?;(\n\u2014\u2013\u2026]|\s-|--|(?<=[,:])(?!\s*or\b))[\s*\"'(_]{0,6}"
    r"(?:or|otherwise|alternatively|else|maybe|perhaps|possibly|probably|instead|rather)\b"
    r"(?:\W{1,6}(?:it|the|answer|value|result|is|was|could|might|may|be|even|just|maybe|perhaps|possibly|also|well"
    rf"|else|probably|equally))*\W{{0,6}}{_VALUE}"
    r"|\b(?:it|answer|value|result|solution)\s+(?:could|might|may|can|should|must)\s+"
    r"(?:(?:also|just|as|well|equally|instead|really|actually|very|rather)\s+)*(?:be|have been|equal)\s+"
    rf"(?:\w+\s+){{0,2}}?{_VALUE}|\b(?:unless|instead)\b[^.\n]{{0,40}}?{_VALUE}",
    _phrases(
        """or, otherwise, alternatively, else, maybe, perhaps, possibly, probably, instead, rather, could, might, may,
        can, should, must, unless"""
    ),
    ignores_case=True,
)
_COULD_BE = _Rule(
    r"[.!?;,]\s*(?:it )?(?:could|might|may) (?:also |just as well |well )?be\b",
    _phrases("could, might, may"),
    _phrases("be"),
    ignores_case=True,
)
