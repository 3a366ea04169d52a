r"""Words around an answer that take it back: negations, conditions and doubts before it, corrections behind it.

"The answer is not 5" has no answer, nor has "5. No, 6". What a text may say besides is open-ended, so these rules list
what takes an answer back. A negation counts where it governs the answer, that is, where only words such as "is the
correct answer" stand between the two: "the number that is not prime is 5" denies nothing.
"""

import re

_NUMBER_WORDS = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen|twenty"
    "|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|a dozen"
)
_VALUE = (
    r"(?:[($\s]|\\[(\[]|\\\$|\\text\s*\{|\*\*)*+[-\u2212+]?\s*(?:\d|\\(?:[dt]?frac|boxed|fbox|sqrt|pi|infty|binom|sin|cos|tan|ln|log)(?![a-z])|[a-z]\s*=\s*[-\d\\]|\(?[A-H]\)"
    rf"|(?:{_NUMBER_WORDS})\b)"
)
_NOT = r"(?:\bnot|n['\u2019]t|\bcannot|\bnever|\bno longer|\bhardly|\bscarcely)"
_FILLER = (
    r"(?:\b(?:is|are|was|were|am|be|been|being|equals?|to|the|an?|that|this|it|its|we|you|i|one|they|anyone|have"
    r"|has|had"
    r"|get|got|gets|say|says|said|think|thought|believe|believed|claim|claimed|mean|means|find|conclude|see|true"
    r"|case|answers?"
    r"|values?|results?|solutions?|correct|right|final|actual|real|exactly|precisely|true|any|necessarily|really"
    r"|actually|simply|just"
    r"|even|always|quite|in|fact|as|for|problem|question|our|your|my|so|then|here|equal|should|would|could|can|must"
    r"|will"
    r"|may|might|do|does|did|sure|certain|convinced|likely|mathematically|definitely|certainly|like|given|by"
    r"|following|expected|"
    r"wanted|output|outcome|number|of|there|how|many)\b"
    r"|\b[b-hj-zB-Z]\b|[\s$=:,*\"'`({\[\\&_\u2018\u2019\u201c\u201d-])*+"
)
# Of casefolded text: ignoring case takes three times as long.
_DENIED_BEFORE = re.compile(
    rf"(?:{_NOT}|\b(?:neither|nor|nothing|nobody|no one|none|wrong(?:ly)?|incorrect(?:ly)?|false(?:ly)?|untrue"
    rf"|mistaken(?:ly)?"
    r"|mistakes?|errors?|erroneous(?:ly)?|bogus|doubt|deny|denies|rejects?|rejected|excludes?|excluding|exclude"
    r"|rules? out|ruled out|except"
    r"|but not|anything but|all but|everything but|other than|rather than|instead of|unlike|different from"
    r"|differs from|differ from"
    r"|far from|distinct from|contrary to|impossible|ignore|ignoring|forget|discard|discarded|avoid|unequal to"
    r"|no answer|no"
    r"|suppose|supposing|supposed|assume|assuming|imagine|pretend|(?<!only )if(?! and only)|unless|whether|lest"
    r"|maybe|perhaps|possibly|probably|presumably|guess|guessing|guessed|unsure|not sure|unclear"
    rf")\b){_FILLER}$",
)
_NO_NEAR = re.compile(r"\bno\s*$")
_MIGHT = re.compile(
    r"\b(?:could|might|may)\s+(?:(?:also|well|just|as|still|perhaps|possibly|instead|very)\s+)*(?:be|equal|have been)"
    r"(?:\s+(?:the|answer|equal|to|either))*[\s$:(\\\[*]*$|(?:^|[.!?;]\s*)\W*(?:or|else|otherwise)\b" + _FILLER + "$",
)
_GOVERNED = re.compile(
    r"(?:\b(?:less|more|greater|fewer|larger|smaller|bigger|lower|higher|other|else|farther"
    r"|further) than(?: or)?(?: equal to)?"
    r"|\b(?:below|above|under|exceeds?|exceeding|twice|thrice|double|triple|half|minus|negative|plus|times|divided by"
    r"|multiplied by|(?:square|cube|cubic|fourth|\w+th) root of|the (?:square|cube|reciprocal|inverse|opposite"
    r"|negative|negation"
    r"|complement|factorial|half|double|triple|third|quarter|logarithm|log|absolute value|successor|predecessor) of"
    r"|(?:a |one )?(?:third|quarter|fourth|fifth|tenth|half|percent|multiple|factor|divisor|power|fraction|part"
    r"|root) of"
    r"|divisible by|close to|near|squared|next to|out of|anywhere from|up to but not including|either"
    r"|not equal to|opposite of|opposite:|reciprocal of|inverse of|ten to the|to the power(?: of)?"
    r"|between [^.]{1,20} and|\w+ more than"
    r"|\w+ less than|base))"
    r"(?:\s+(?:be|equal|equal to|of|the|number|value|answer|a|an|exactly|only|just))*[\s$(\\\[*:]*$",
)
_CLAUSE = re.compile(r"[.!?;\u3002](?=\s|$)")

_WRONG = (
    r"(?:wrong|incorrect|false|untrue|impossible|mistaken|erroneous|invalid|inadmissible|excluded|rejected"
    r"|extraneous|absurd"
    r"|nonsense|bogus|unlikely|doubtful|questionable|off|ruled out|out of the question|(?:too|way too) \w+"
    r"|(?:(?:only|just|merely|simply) )?(?:a|an|my|the|our)"
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
    r"|acceptable|accepted|what|equal"
    r"|value|result|hold|work|count|fit|satisfy|final|accurate|me|sure|certain|$)(?:\b|$)"
)
_COPULA = (
    r"(?:is|are|was|were|would be|will be|must be|should be|seems(?: to be)?|looks|appears(?: to be)?"
    r"|turns out to be|has to be|can be|could be|might be|may be|be|'s)"
)
_NEGATED_COPULA = (
    r"(?:(?:is|are|was|were|would|will|must|should|can|could|may|might|does|do|did|has|need)\s*(?:n['\u2019]t"
    r"|\s?not|\s+never|\s+no longer|\s+hardly)"
    r"|cannot|can['\u2019]t|won['\u2019]t)"
)
_SUBJECT = (
    r"(?:which|that|this|it|but|and|though|although|however|yet|so|answer|value|result|the|last|above|one|here"
    r"|guess|all)"
)
_DENIED_BEHIND = re.compile(
    rf"^\W*+(?:{_SUBJECT}\b\W++){{0,8}}?(?:{_COPULA}\s+{_DENIED}|{_NEGATED_COPULA}{_OBJECT}|{_COPULA}\s+(?:not"
    rf"|never){_OBJECT}"
    rf"|{_NEGATED_COPULA}\s+(?:be\s+)?$|fails?\b|(?:wrong|incorrect|false|not)\s*[.!?)*\n]|(?:wrong|incorrect"
    rf"|false)\s*$|not\s*$|isn['\u2019]t\b|{_COPULA}\s+no\s+(?:solution|answer|root|option|candidate)\b|(?:might"
    rf"|may|could)\s+(?:\w+\s+)?be\s+(?:the\s+)?(?:answer|right|correct|it|true)\b)",
    re.IGNORECASE,
)
_CHANGED_BEHIND = re.compile(
    rf"^\W{{0,6}}(?:(?:times|over|plus|minus|(?:reduc|increas|decreas|lower|diminish|rais|shorten)ed by"
    rf"|multiplied by|divided by|modulo|mod|to the power(?: of)?"
    rf"|raised to(?: the)?|point|remainder|out of|to the|less|upon|percent of|degrees and|dollars and|minutes and"
    rf"|feet and|hours and)(?:\s+the)?{_VALUE}"
    r"|(?:squared|cubed|factorial|doubled|tripled|halved|quadrupled|inverted|negated|reversed|plus or minus"
    r"|give or take|and a (?:half|quarter|third|bit)|and change|and (?:one|two|three) (?:half|halves|thirds?"
    r"|quarters?|fifths?)"
    r"|or (?:something|another|anything|other|some|else|more|less|so|fewer|thereabouts|greater|higher|lower|above"
    r"|below|under|over|not)|at (?:least|most)|ish"
    r"|to the (?:power|nth|first|second|third|fourth|fifth)|raised to|(?:th|nd|rd|st) (?:root|power|part)|if|unless"
    r"|only if|whenever|provided|assuming)\b"
    rf"|(?:more|less|fewer|greater|smaller|larger|bigger|higher|lower)(?:\s+\w+)?\s+than\s+(?:{_VALUE}|that\b"
    rf"|this\b|it\b))",
    re.IGNORECASE,
)
_DOUBTED_BEHIND = re.compile(
    r"^[\s*$)\]}\\]*\?|^\W*(?:maybe|perhaps|possibly|probably|presumably|i guess|or not)\b", re.IGNORECASE
)
_MORE_BEHIND = re.compile(
    rf"^\W*(?:or|either|and/or|vs\.?|versus)\s+(?:\w+\s+){{0,4}}?{_VALUE}|^\W*(?:,|and|&|;|/|\||as well as|and also"
    rf"|or also)\s*{_VALUE}[^a-zA-Z]*$"
    rf"|^\s*(?:\\(?:to|(?:long)?rightarrow|mapsto|leadsto)(?![a-z])|-+>|\u2192)[\s$]*{_VALUE}"
    rf"|^\s*(?:to|through)\s+{_VALUE}|^\W{{0,4}}(?:,|and)\s*{_VALUE}[\d,.\s$]*(?:[.!?]|$)|^\W*(?:or|,)\s+[A-H]\b\W*$",
    re.IGNORECASE,
)
_OPENS = r"(?:^|[.!?;:,(\n\u2014\u2013\u2026]|\s-|--)[\s*\"'(_]{0,6}"
_TAKEN_BACK = re.compile(
    _OPENS + r"(?:(?:but|oh|ah|uh|um|and|so|well|or)[,\s]{1,4}){0,4}"
    r"(?:actually|wait|oops|ops|whoops|hmm+|hm|sorry|correction|corrected|scratch (?:that|this|it)|(?:on"
    r"|upon) second thoughts?|second thoughts?|"
    r"or rather|rather[,:]|i mean|i meant|just kidding|kidding|never ?mind|strike that|jk|lol|i lied|or not"
    r"|my (?:mistake|bad|error)"
    r"|hold on|apologies|i apologi[sz]e|i take (?:that|it|this) back|"
    r"no(?:pe)?\s*(?:[,.:;!\u2014-]|it|that|this|wait|the answer|i)|not!|no\s*$|wrong(?:ly)?\s*(?:[,.:!)]|$)"
    r"|incorrect\s*(?:[,.:!)]|$)|false\s*(?:[.:!)]|$)|not really|not quite|not so fast|ignore (?:that|this|it)"
    r"|forget (?:that|this|it)|"
    r"i (?:was|am|'m) (?:wrong|mistaken|not sure|unsure)|i'm (?:wrong|mistaken|not sure|unsure)|i (?:made|have made"
    r"|misread|miscounted|miscalculated|forgot|do not know|don't know|am guessing|was guessing)|there (?:is"
    r"|was) (?:a|an) (?:mistake|error)|"
    r"correct(?:ing|ed)?\s*:|edit\s*:|update\s*:|erratum)(?:\b|(?<=\W)|$)",
    re.IGNORECASE,
)
_DENIED_LATER = re.compile(
    rf"(?<!if )\b(?:that|this|it|which|above|answer|value|result|guess|solution"
    rf"|one)\b\s*(?:{_COPULA}\s+(?:(?:definitely"
    rf"|certainly|clearly|obviously|probably|simply|actually|really|also|of course|in fact|just)\s+)*(?:wrong"
    rf"|incorrect|false|mistaken|erroneous|a (?:lie|joke|guess|trap|bluff)\b|(?:(?:a|an|my|our) )?(?:mistake|error"
    rf"|typo)\s*[.!\n])|{_NEGATED_COPULA}(?:\s+be)?\s+(?:the\s+|a\s+)?(?:right|correct|final|actual|real|true"
    rf"|valid)?\s*(?:answer|correct|right|true|it|so|valid)\b"
    rf"|{_COPULA}\s+(?:not|never)\s+(?:the\s+|a\s+)?(?:right|correct|final|actual|real|true|valid)?\s*(?:answer"
    rf"|correct|right|true|it|so|valid)\b)"
    r"|\b(?:should|must|ought to)\s+(?:have been|really be|rather be|actually be|instead be|be instead)\b",
    re.IGNORECASE,
)
_ANOTHER_LATER = re.compile(
    rf"(?:^|[.!?;(\n\u2014\u2013\u2026]|\s-|--|(?<=[,:])(?!\s*or\b))[\s*\"'(_]{{0,6}}(?:or|otherwise|alternatively"
    rf"|else|maybe|perhaps|possibly|probably|instead|rather)\b(?:\W{{1,6}}(?:it|the|answer|value|result|is|was"
    rf"|could|might|may|be|even|just|maybe|perhaps|possibly|also|well|else|probably|equally))*\W{{0,6}}{_VALUE}"
    rf"|\b(?:it|answer|value|result|solution)\s+(?:could|might|may|can|should|must)\s+(?:(?:also|just|as|well"
    rf"|equally|instead|really|actually|very|rather)\s+)*(?:be|have been|equal)\s+(?:\w+\s+){{0,2}}?{_VALUE}"
    rf"|\b(?:unless|instead)\b[^.\n]{{0,40}}?{_VALUE}",
    re.IGNORECASE,
)
_OF_ANSWER = re.compile(
    r"\b(?:twice|thrice|half|double|triple|times|plus|minus|than|negative|(?:square|cube|root|opposite|reciprocal|inverse|negation"
    r"|negative|half|double|third|quarter|percent|logarithm|factorial|multiple|complement|sum|product|difference) of)"
    r"(?: the| our| my| this| of)*(?: final| right| correct)*"
    r" (?:answer|result)\b|\b(?:answer|result) (?:plus|minus|times|squared|cubed|doubled|halved|tripled"
    r"|divided|multiplied|over|less|increased|decreased|reduced|mod|modulo|rounded|negated|inverted)\b",
    re.IGNORECASE,
)
_KNOWN_WRONG = re.compile(r"^\W*which\b[^.\n]{0,40}\b(?:wrong|incorrect|false|mistaken)\b", re.IGNORECASE)
_OF_NUMBER = re.compile(rf"^[\s$]*of\s+{_VALUE}")
_HIDDEN = re.compile(r"(?:~~|<(?:s|del|strike)>|<!--|[\u2717\u2718\u274c])[\s$\\(\[]*$|(?:^|\s)%[^\n]*$")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|textit|textrm|mathrm)\s*\{")
_COULD_BE = re.compile(r"[.!?;,]\s*(?:it )?(?:could|might|may) (?:also |just as well |well )?be\b", re.IGNORECASE)
_MAX_LATER = 4000
_MAX_CLAUSE = 300
_END = re.compile(r"[.!?](?:[\s$*\"')\]]|\\[)\]]|$)|\n")


def objection(before: str, after: str, answer: str = "") -> str:
    """Return why the words around an answer take it back; empty where they do not."""
    before = before[-300:]
    if _HIDDEN.search(before):
        return "an answer with parts that are not printed or not meant"
    before = before.casefold()
    clause = _CLAUSE.split(before)[-1]
    if _DENIED_BEFORE.search(clause) or _NO_NEAR.search(clause):
        return "denied, supposed or doubted"
    if _MIGHT.search(before):
        return "denied, supposed or doubted"
    if _GOVERNED.search(clause) or _OF_ANSWER.search(clause):
        return "a word that changes the value"
    if answer.endswith(("%", "percent")) and _OF_NUMBER.match(after):
        return "a word that changes the value"
    return _behind(after[: _MAX_LATER // 2] + " " + after[_MAX_LATER // 2 :][-_MAX_LATER // 2 :])


def taken_back(later: str) -> str:
    """Return why what is written after an answer takes it back; empty where it does not."""
    if _ANOTHER_LATER.search(later) or _COULD_BE.search(later):
        return "several answers"
    return "taken back" if _TAKEN_BACK.search(later) or _DENIED_LATER.search(later) else ""


def _behind(after: str) -> str:
    after = _TEXT.sub(" ", after[:_MAX_CLAUSE]) + after[_MAX_CLAUSE:]
    after = re.sub(r"^(?:[\s$*}]|\\[)\]])+", " ", after)
    end = _END.search(after)
    clause = after[: end.start() + 1 if end else len(after)][:_MAX_CLAUSE]
    if _DOUBTED_BEHIND.match(clause):
        return "denied, supposed or doubted"
    if _DENIED_BEHIND.match(clause) or _KNOWN_WRONG.match(clause):
        return "denied behind it"
    if _CHANGED_BEHIND.match(clause):
        return "a word that changes the value"
    return "several answers" if _MORE_BEHIND.match(clause) else taken_back(after)
