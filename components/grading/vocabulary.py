"""Words that the grader knows: words that do not name counted things, functions, and commands for styles of text."""

import re

FUNCTION_WORDS = """
a about above across after again against all almost along already also although always am among an and another any
anyone anything arccos arcsin arctan are around as asked at away be because been before began being below beside
besides between both but by came cannot cos cosh cost costs cot could csc did different do does doing done down
during each either else enough equal equals even ever every everyone everything exactly except exp false far few fewer
find first for found from gave gcd get gets give given gives go goes going gone got had half has have having he her
here hers herself him himself his how however if in incorrect infinity instead into is it its itself just last lcm
least less let like log made make makes many max may maybe me might min mine mod more most much must my neither never
next no none nor not nothing now of off often on once one only onto or other others otherwise our ours out over own
per perhaps possible possibly put rather same sec second several shall she should sin since sinh so some someone
something sometimes sqrt still such tan tanh than that the their theirs them then there these they this those though
through thus till times to together too took total toward twice under unknown unless unlike until up upon us use used
uses versus very via was we well went were what whatever when whenever where whereas wherever whether which while
who whoever whole whom whose why will with within without would wrong yes yet you your yours
"""
"""Words that are never units, even if they follow a number in the question."""

TEXT_STYLES = (
    *("text", "mbox", "textbf", "textit", "textrm", "textnormal", "texttt", "textsf", "textsc"),
    *("mathrm", "operatorname"),
)
"""Commands whose argument may be words or a unit."""
STYLE = rf"\\(?:{'|'.join(TEXT_STYLES)})\*?\s*"
STYLED = re.compile(STYLE + r"\{([^{}]*)\}")

FUNCTION_NAMES = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
    *("sin", "cos", "tan", "cot", "sec", "csc", "log", "exp"),
)
"""Functions of numbers that are written as words."""
