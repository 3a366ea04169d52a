"""The twin of the mutations that change an answer: other notations of the same answer."""

import random
import re

from components.shared.answer_policy import AnswerPolicy
from tests.grading.hacks.rights import Mutant, Right, framed

_AROUND = {
    "delimiters": ("${x}$", r"\({x}\)", r"\[{x}\]", r"$${x}$$", r"$ {x} $"),
    "space": (r"\,{x}", r"{x}\,", "  {x}  ", r"\ {x}", r"{x}\;", r"\quad {x}", r"~{x}", r"{x}\!", r"\: {x}"),
    "period": ("{x}.", "{x}. ", r"{x}\\", "{x},"),
    "bold": (r"\mathbf{{x}}", r"\boldsymbol{{x}}", r"\bf {x}", r"\bm{{x}}"),
    "style": (r"\displaystyle {x}", r"\textstyle {x}", r"\large {x}", r"\mathrm{{x}}", "{{x}}"),
    "equals": ("= {x}", "={x}"),
}
_FOR_NUMBERS = {"bold", "style"}
_COMMANDS = (
    *((r"\frac", r"\dfrac"), (r"\frac", r"\tfrac"), (r"\dfrac", r"\frac"), (r"\text{", r"\mbox{")),
    *((r"\text{", r"\textrm{"), (r"\cdot", r"\times"), (r"\le ", r"\leq ")),
)  # fmt: skip
_MATH_SPACE = re.compile(r"(?<=[-+=,])\s+|(?<=[0-9])\s*(?=[-+=])")
_ONE_PAIR = re.compile(r"[^()\[\]]*\([^()\[\]]*\)[^()\[\]]*")


def kept(generator: random.Random, right: Right) -> Mutant:
    """Return a response whose answer is the gold in another notation, or as it is in another place."""
    answer = right.gold
    is_maths = "text" not in answer and "mbox" not in answer and not right.words
    if is_maths and generator.random() < 0.5:
        answer = _MATH_SPACE.sub(lambda _: generator.choice(("", " ", "  ", r"\,")), answer)
    if generator.random() < 0.4:
        answer = answer.replace(*generator.choice(_COMMANDS))
    if is_maths and generator.random() < 0.3 and r"\left" not in answer and _ONE_PAIR.fullmatch(answer):
        answer = answer.replace("(", r"\left(").replace(")", r"\right)")
    around = generator.choice([*_AROUND, "nothing"])
    if (around in _FOR_NUMBERS and right.number is None) or (around == "equals" and not right.number):
        around = "nothing"
    if around != "nothing":
        answer = generator.choice(_AROUND[around]).replace("{x}", answer)
    if around in {"delimiters", "period"} or generator.random() < 0.5:
        response, policy = rf"\boxed{{{answer}}}", AnswerPolicy.STATED
    else:
        response, policy = framed(generator, answer)
    return Mutant(around, right.gold, response, right.question, policy)
