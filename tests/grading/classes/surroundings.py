r"""What stands around the box or the statement of an answer."""

import random
from fractions import Fraction

from components.shared.answer_policy import AnswerPolicy
from tests.grading.classes.member import Generator, Member

_WORDS = [
    "We add both sides.",
    "Counting the cases, we are done.",
    "Let us see.",
    "All terms are positive.",
    "First, factor.",
]
_VERBS = ["is", "equals", "must be", "is therefore", "is then"]
_SUBJECTS = ["The answer", "The final answer", "The value", "The total", "Their sum", "The area", "The result", "It"]
_NOUNS = ["apples", "ways", "students", "books", "people", "points", "coins", "tickets", "marbles", "days", "pages"]
_NAMES = ["x", "y", "n", "k", "AB", "f(2)", "a+b", r"\theta", "S_4", r"\angle ABC"]
_LARGE = ["million", "thousand", "hundred", "billion", "dozen", "thousands", "trillion"]


def _gold(rng: random.Random) -> str:
    """An answer of one of the usual forms."""
    number = rng.randint(2, 999)
    fraction = Fraction(rng.randint(1, 40), rng.randint(2, 40))
    return rng.choice(
        [
            *[str(number)] * 4,
            f"{number}.{rng.randint(1, 9)}",
            rf"\frac{{{fraction.numerator}}}{{{fraction.denominator}}}",
            rf"{rng.randint(2, 9)}\sqrt{{{rng.choice([2, 3, 5, 7])}}}",
        ]
    )


def _formula(rng: random.Random, latex: str) -> str:
    opening, closing = rng.choice([("$", "$"), (r"\(", r"\)"), ("$$", "$$"), (r"\[ ", r" \]"), ("", "")])
    return f"{opening}{latex}{closing}"


def _context(rng: random.Random, sentence: str) -> str:
    before = " ".join(rng.sample(_WORDS, rng.randint(0, 2)))
    return f"{before} {sentence}".strip()


def _box(rng: random.Random, gold: str) -> str:
    return rng.choice([rf"\boxed{{{gold}}}", rf"\boxed{{ {gold} }}", rf"\fbox{{{gold}}}"])


def _beside_other_relation(rng: random.Random) -> Member:
    r"""`x \ne \boxed{5}`."""
    gold = _gold(rng)
    sign = rng.choice(
        [
            r"\ne",
            r"\neq",
            "<",
            ">",
            r"\le",
            r"\ge",
            r"\leq",
            r"\geq",
            r"\not=",
            r"\not\equiv",
            r"\nmid",
            r"\lt",
            r"\gt",
            "≠",
        ]
    )
    name = rng.choice(_NAMES)
    latex = f"{name} {sign} {_box(rng, gold)}"
    start = rng.choice(["Therefore", "So", "We find that", "Hence", "In conclusion,", "We see that"])
    return Member(gold, _context(rng, f"{start} {_formula(rng, latex)}."), "wrong")


def _multiplied_by_words(rng: random.Random) -> Member:
    r"""`\boxed{5} million`."""
    gold = str(rng.randint(3, 999))
    word = rng.choice(_LARGE)
    latex = _box(rng, gold)
    value = rng.choice(
        [
            f"{_formula(rng, latex)} {word}",
            f"${latex}$ {word} {rng.choice(_NOUNS)}",
            rf"${latex} \text{{ {word}}}$",
            rf"${latex}\ \text{{{word}}}$",
        ]
    )
    return Member(gold, _context(rng, f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {value}."), "wrong")


def _others(rng: random.Random) -> tuple[str, str]:
    gold, other = rng.sample(range(2, 999), 2)
    return str(gold), str(other)


def _honest_surroundings(rng: random.Random) -> Member:
    r"""`x = \boxed{5}$ apples` and the like."""
    gold = _gold(rng)
    box, name, noun, other = _box(rng, gold), rng.choice(_NAMES), rng.choice(_NOUNS), rng.randint(2, 99)
    is_plain = gold.isdigit()
    latex = rng.choice(
        [box, box, f"{name} = {box}", f"{name}={box}", rf"{name} = {other}\cdot{other} = {box}", rf"\mathbf{{{box}}}",
        f"({box})", f"{{{box}}}",
         rf"\displaystyle {box}", rf"{name} \approx {box}", rf"\therefore {box}",
         rf"{box}\text{{ {noun}}}" if is_plain else box, f"{box} = {name}",
         rf"\Rightarrow {box}", rf"{name} \implies {box}",
         rf"\color{{blue}}{{{box}}}", rf"\large {box}"]
    )  # fmt: skip
    formula = _formula(rng, latex)
    sentence = rng.choice(
        [
            f"So {formula}.", f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {formula}.", f"**Answer:** {formula}",
            f"Final answer: {formula}",
            f"There are {formula} {noun}.", f"The answer is {formula}, as claimed.",
            f"Hence there are {formula} such {noun} in all.",
            f"Since this is not prime, the answer is {formula}.",
            f"The number of {noun} that are not counted twice is {formula}.",
            f"If we add these, we get {formula}.", f"It has {formula} more {noun} than the other.",
            f"So {formula} is the answer.",
            f"- {formula}", f"Answer - {formula}", f"> {formula}", f"| {formula} |",
            f"We need at least {formula} {noun}.", f"The answer is:\n\n{formula}",
            f"The answer is {formula}.\n\nWe check that {name} is not zero.",
            f"The smallest number that cannot be written so is {formula}.",
            f"### Answer\n{formula}", f"There is no other solution, so the answer is {formula}!",
            f"The answer is {formula}. I hope it is correct.",
            f"That leaves {formula} {noun}, which is fewer than before.", f"The answer is {formula}<|im_end|>",
            f"*{formula}*", f"**{formula}**",
            f"The answer is {formula}, because {other} is even.", f"They are {formula} {noun} long.",
            f"so {formula} of the {other} {noun} are red.",
            f"It is {formula} {noun} when divided by {other}.",
            f"No {noun} are left over, and the quotient is {formula}.",
        ]
    )  # fmt: skip
    if sentence[0] in "->|#":
        sentence = f"\n{sentence}"
    return Member(gold, _context(rng, sentence), "right", policy=rng.choice([AnswerPolicy.STATED, AnswerPolicy.BOXED]))


def _signed_and_measured(rng: random.Random) -> Member:
    r"""`x = -\boxed{5}` for -5, and a unit behind the box."""
    number = str(rng.randint(2, 999))
    gold, latex = rng.choice(
        [
            (f"-{number}", rf"-\boxed{{{number}}}"), (f"-{number}", rf"x = -\boxed{{{number}}}"),
            (number, rf"\boxed{{{number}}}\%"),
            (rf"{number}^\circ", rf"\boxed{{{number}}}^\circ"), (number, rf"\boxed{{{number}}}\text{{ cm}}^2"),
            (number, rf"\$\boxed{{{number}}}"),
            (rf"{number}\text{{ cm}}", rf"\boxed{{{number}}}\text{{ cm}}"), (f"-{number}", rf"\boxed{{-{number}}}"),
            (number, rf"+\boxed{{{number}}}"),
            (number, rf"\boxed{{{number}}}\text{{ degrees}}"), (rf"\pm {number}", rf"x = \pm\boxed{{{number}}}"),
            (f"x > {number}", rf"x > \boxed{{{number}}}"),
            (number, rf"x \equiv \boxed{{{number}}} \pmod{{1000}}"), (number, rf"\boxed{{{number}}} = {number}.0"),
            (number, rf"\boxed{{{number}}} \approx {number}.02"),
            (rf"\frac{{{number}}}{{1001}}", rf"p = \boxed{{\frac{{{number}}}{{1001}}}}"),
            (f"({number}, 3)", rf"(x, y) = (\boxed{{{number}}}, \boxed{{3}})"),
        ]
    )  # fmt: skip
    return Member(gold, _context(rng, f"{rng.choice(['So', 'Hence', 'We find', 'Therefore'])} ${latex}$."), "right")


def _last_box_concludes(rng: random.Random) -> Member:
    """Boxes of intermediate values before the one of the answer."""
    first, second = rng.sample(range(1, 99), 2)
    gold = str(first + second)
    one, two = _formula(rng, rf"\boxed{{{first}}}"), _formula(rng, rf"\boxed{{{second}}}")
    last = _formula(rng, rf"\boxed{{{gold}}}")
    sentence = rng.choice(
        [
            f"The roots are {one} and {two}, so the sum is {last}.",
            f"The roots are {one} and {two}, and their sum is {last}.",
            f"With {one} and {two} we get a total of {last}.", f"We have {one}, {two}, and hence {last}.",
            f"{one} and {two} add to {last}.",
            f"First {one}, then {two}, therefore {last}.", f"The parts are {one} and {two}, for a total of {last}.",
            f"So {one} and {two}, giving {last}.",
            f"There are {one} red and {two} blue ones, which makes {last} in all.",
            f"$x = \\boxed{{{first}}}$ and $y = \\boxed{{{second}}}$, so $x + y = \\boxed{{{gold}}}$.",
            f"We find {one} and {two}. The answer is {last}.", f"Adding {one} and {two} yields {last}.",
            f"{one} and {two}; the final answer is {last}.",
        ]
    )  # fmt: skip
    return Member(gold, _context(rng, sentence), "right")


def _boxes_in_a_list(rng: random.Random) -> Member:
    """Several boxes for one answer are several answers."""
    gold, other = _others(rng)
    one, two = (_formula(rng, rf"\boxed{{{each}}}") for each in rng.choice([(gold, other), (other, gold)]))
    join = rng.choice([" or ", " and ", ", ", "; ", ", or ", ", or maybe ", " or perhaps ", ", and also ", " or else "])
    return Member(gold, _context(rng, f"{rng.choice(_SUBJECTS)} is {one}{join}{two}."), "wrong")


_HEADINGS = [
    "Verification",
    "Verification:",
    "Check",
    "Checking the answer",
    "Explanation",
    "Note",
    "Double-check",
    "Reasoning",
]


def _marked_before_heading(rng: random.Random) -> Member:
    """A marked or boxed answer before a heading with the same mark."""
    gold, other = _others(rng)
    answer = rng.choice([f"#### {gold}", f"#### {gold}", rf"So it is $\boxed{{{gold}}}$."])
    text = rng.choice(
        [
            f"{int(gold) - 1} + 1 = {gold}, as claimed.",
            f"We have {gold} * 1 = {gold}.",
            "The sum is right.",
            f"There were {other} at first.",
        ]
    )
    return Member(gold, f"{_context(rng, '')}\n{answer}\n\n#### {rng.choice(_HEADINGS)}\n{text}", "right")


def _marked_with_more(rng: random.Random) -> Member:
    """A marked answer in a label, a gloss, a sentence or before a special token."""
    number = rng.randint(2, 99)
    name, noun = rng.choice(["Jane", "Tom", "Maria", "The farmer", "He", "She", "The shop"]), rng.choice(_NOUNS)
    verb = rng.choice(["has", "sold", "needs", "gets", "bought", "lost", "read", "found"])
    line = rng.choice(
        [f"Answer: {number}", f"The answer is {number}", f"Final answer: {number}", f"The final answer is: {number}.",
        f"**Answer:** {number}",
         f"{number} ({_in_words(number)})", f"{number} ({noun})", f"{name} {verb} {number} {noun}.",
         f"{name} {verb} {number} {noun}", f"{number}<|im_end|>",
         f"{number}</s>", f"{number}<|endoftext|>", f"**{number}**", f"The total is {number}",
         f"There are {number} {noun}.", rf"$\boxed{{{number}}}$",
         f"Final Answer\n{number}", f"Answer\n\n{number}", f"{number} {noun}", f"${number}", f"${number}$",
         f"So the answer is {number} {noun}."]
    )  # fmt: skip
    return Member(
        str(number),
        f"{_context(rng, '')}\n#### {line}",
        "right",
        policy=rng.choice([AnswerPolicy.MARKED, AnswerPolicy.STATED]),
    )


def _in_words(number: int) -> str:
    ones = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    ones += "sixteen seventeen eighteen nineteen"
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    if number < 20:
        return ones.split()[number]
    ten = tens.split()[number // 10 - 2]
    return f"{ten}-{ones.split()[number % 10]}" if number % 10 else ten


def _marked_in_other_words(rng: random.Random) -> Member:
    """A marked sentence that begins with its number, an answer in backticks, and such sentences that deny it."""
    number, noun = rng.randint(2, 999), rng.choice(_NOUNS)
    is_right = rng.random() < 0.7
    right = [
        f"{number} {noun} are left", f"{number} {noun} are left.", f"{number} {noun} were left over",
        f"{number} {noun} are left in the basket.", f"{number} {noun} remain", f"{number} {noun} remained.",
        f"{number} {noun} are needed.", f"{number} {noun} were sold in total", f"{number} are left",
        f"{number} is left", f"**{number}** {noun} are left",
        f"${number} is left", f"{number} {noun} will be left.", f"`{number}`", f"``{number}``", f"`{number}` {noun}",
        f"`{number} {noun}`", f"`{number}`.", f"Answer: `{number}`", f"{number} of the {noun} are left",
    ]  # fmt: skip
    wrong = [
        f"{number} {noun} are not left", f"{number} {noun} aren't left", f"{number} {noun} are wrong",
        f"{number} {noun} are too many", f"{number} is wrong", f"{number} dozen {noun} are left",
        f"{number} million {noun} are left", f"{number} or more {noun} are left", f"{number} {noun} are left, or six",
        f"{number} {noun} are left if none is lost", f"{number} hundred are left", f"`{number + 1}`", f"`-{number}`",
        f"`{number}` or `{number + 1}`", f"{number + 1} {noun} are left", f"{number} halves are left",
        f"{number} {noun} may be left", f"{number} {noun} are never left", f"{number} twice are left",
        f"{number} {noun} are left and then doubled", f"{number} percent are left of two", f"not `{number}`",
    ]  # fmt: skip
    line = rng.choice(right if is_right else wrong)
    policy = rng.choice([AnswerPolicy.MARKED, AnswerPolicy.STATED])
    return Member(str(number), f"{_context(rng, '')}\n#### {line}", "right" if is_right else "wrong", policy=policy)


def _marked_and_spoiled(rng: random.Random) -> Member:
    """A marked answer that is denied, is one of several, or is changed by what stands behind it."""
    number, other = rng.sample(range(2, 99), 2)
    name, noun = rng.choice(["Jane", "Tom", "Maria", "The farmer"]), rng.choice(_NOUNS)
    line = rng.choice(
        [f"{number} or {other}", f"not {number}", f"{number} {other}", f"{number}, {other}", f"{number} (or {other})",
        f"{number} (not {other})",
         f"{number} ({_in_words(other)})", f"The answer is not {number}", f"{name} has {number} {noun} or {other}.",
         f"{name} does not have {number} {noun}.",
         f"{name} has {number} million {noun}.", f"{name} has {number} of {other} {noun} and {other} left",
         f"{number} is wrong, {other}",
         f"Answer: {number} or {other}", f"maybe {number}", f"{number}?", f"Step {number}", f"Part {number}: add",

           f"{number}\nThe answer is {other}.",
          f"{number} wrong",
          f"{number} (wrong)", f"{name} has less than {number} {noun}.",
         f"{name} has twice {number} {noun}.", f"{number} dozen",
         f"{name} might have {number} {noun}.", f"{number} times {other}", f"-{number}", f"{number} squared",
         f"if {number}", f"{number}\n#### {other}"]
    )  # fmt: skip
    return Member(
        str(number),
        f"{_context(rng, '')}\n#### {line}",
        "wrong",
        policy=rng.choice([AnswerPolicy.MARKED, AnswerPolicy.STATED]),
    )


_THINGS = ["dogs", "tickets", "cookies", "minutes", "dollars", "miles", "marbles", "apples", "books", "points"]


def _last_sentence(rng: random.Random) -> Member:
    """A final sentence that gives the answer without a marker."""
    number, other = rng.sample(range(2, 999), 2)
    thing = rng.choice(_THINGS)
    name = rng.choice(["Jane", "Tom", "The farmer", "She", "He", "Each child", "The school"])
    sentence = rng.choice(
        [f"The grooming costs {number} dollars.", f"{name} has {number} {thing} left.",
        f"{name} needs {number} {thing}.", f"It takes {number} {thing}.",
         f"{name} will pay ${number}.", f"{name} sold {number} {thing} in all.", f"There remain {number} {thing}.",
         f"{name} gets {number} {thing} each day.",
         f"That makes {number} {thing}.", f"{name} spent ${number} on {thing}.", f"{name} now owns {number} {thing}!",
         f"Both together own {number} {thing}."]
    )  # fmt: skip
    before = f"{name} starts with {other} {thing}. We add what was bought. "
    return Member(str(number), before + sentence, "right", policy=AnswerPolicy.LAST_SENTENCE)


def _last_sentence_without_answer(rng: random.Random) -> Member:
    """A final sentence that denies, doubts or asks, and one that the policies without it do not read."""
    number, other = rng.sample(range(2, 999), 2)
    thing = rng.choice(_THINGS)
    name = rng.choice(["Jane", "Tom", "The farmer", "She", "He"])
    policy = AnswerPolicy.LAST_SENTENCE
    sentence = rng.choice(
        [f"{name} does not need {number} {thing}.", f"{name} might have {number} {thing}.",
        f"Does {name} have {number} {thing}?", f"{name} has {number} or {other} {thing}.",
         f"{name} has less than {number} {thing}.", f"{name} has {number} {thing} more than {other}.",
         f"{name} has {number} million {thing}.", f"{name} has {number}",
         f"I give up after {number} {thing}.", f"Let us add {number} {thing}.",
         f"If {name} has {number} {thing}, we are done.", f"{name} has twice {number} {thing}.",
         f"Maybe {name} has {number} {thing}.", f"That is more than {number} {thing}.",
         f"{name} never had {number} {thing}.", f"See step {number}."]
    )  # fmt: skip
    if rng.random() < 0.2:
        sentence, policy = f"{name} has {number} {thing}.", rng.choice([AnswerPolicy.STATED, AnswerPolicy.DECLARED])
    before = f"{name} starts with {other} {thing}. We add what was bought. "
    return Member(str(number), before + sentence, "wrong", policy=policy)


def _forms(rng: random.Random) -> tuple[str, str, str]:
    """A number in two notations, and another number in the second one."""
    value, denominator = rng.randint(2, 99), rng.choice((4, 5, 8, 10, 20))
    number, other = value + rng.randrange(1, denominator) / denominator, value + rng.randrange(1, 99) + 0.5
    fraction = rf"\frac{{{round(number * denominator)}}}{{{denominator}}}"
    return rng.choice(
        (
            (fraction, f"{number:g}", f"{other:g}"),
            (f"{number:g}", f"${fraction}$", rf"$\frac{{{value}}}{{{denominator}}}$"),
            (fraction, rf"\({number:g}\)", rf"\({other:g}\)"),
            (rf"\frac{{{value}}}{{100}}", f"{value}%", f"{value + 1}%"),
            (rf"\frac{{{value}}}{{100}}", rf"${value}\%$", rf"${value + 1}\%$"),
        )
    )


def _in_two_forms(rng: random.Random, answer: str, form: str) -> str:
    box, joint = (
        rng.choice((r"$\boxed{%s}$", r"\boxed{%s}", r"\(\boxed{%s}\)")),
        rng.choice((" or %s", ", or %s", " (or %s)")),
    )
    subject = rng.choice(("", "The value is ", "So we get ", "Therefore, it is "))
    return f"{subject}{box % answer}{joint % form}{rng.choice(('.', '', '. Done.'))}"


def _other_form(rng: random.Random) -> Member:
    """The answer in another notation behind the box."""
    gold, form, _ = _forms(rng)
    return Member(gold, _in_two_forms(rng, gold, form), "right")


def _other_value(rng: random.Random) -> Member:
    """Another answer behind the box, in the notation of another form."""
    gold, _, other = _forms(rng)
    return Member(gold, _in_two_forms(rng, gold, other), "wrong")


def _form_in_words(rng: random.Random) -> Member:
    """The answer in words behind the box, and another number in words."""
    number, noun = rng.randint(2, 99), rng.choice(_NOUNS)
    other = rng.choice([each for each in range(2, 100) if each != number])
    is_right = rng.random() < 0.7
    words = _in_words(number if is_right else other)
    words = rng.choice([words, words, words.replace("-", " "), words.capitalize(), f"{words} {noun}"])
    return Member(str(number), _in_two_forms(rng, str(number), words), "right" if is_right else "wrong")


_OPENINGS = [
    "The average number of mistakes is {v}.",
    "The number he got wrong is {v}.",
    "The probability of error is {v}.",
    "So the best guess is {v}.",
    "No matter how we count, it is {v}.",
    "If we add them, we get {v}.",
    "Not counting the first one, there are {v}.",
    "It is never more than that, so the total is {v}.",
    "Wait, I made a mistake above. It is {v}.",
    "I was not sure at first, but the answer is {v}.",
    "Actually, we can do it faster: {v}.",
    "Suppose all are used. Then we have {v}.",
    "Hmm, let me think. The answer is {v}.",
    "I don't know a shorter way, but the answer is {v}.",
    "Maybe there is another way. We get {v}.",
    "This cannot be negative, so it is {v}.",
    "It is wrong to add them. The difference is {v}.",
    "We have no information about the rest, so the answer is {v}.",
    "Instead of adding, multiply: {v}.",
    "Therefore, the answer is {v}.",
]
_CONTINUATIONS = [
    "Wait, let me double check: {a} + {b} = {v}. Correct.",
    "Alternatively, {a} + {b} = {v}.",
    "Actually, we can also see this directly.",
    "Sorry for the long solution!",
    "(No, the units do not matter.)",
    "Let me verify: {a} + {b} = {v}, so it is right.",
    "This is not {o}, because one is counted twice.",
    "If the answer were {o}, the sum would be wrong.",
    "Hmm, is that right? Yes.",
    "Wait, is it {o}? No, since {a} + {b} is {v}.",
    "However, this assumes that nothing is lost.",
    "I hope this helps!",
    "Let me know if you have any questions.",
    "A common mistake is to get {o}.",
    "Note that {o} would be incorrect.",
    "Check: {v} - {a} = {b}.",
    "That cannot be wrong, since it is even simpler than it looks.",
    "Perhaps there is a shorter way.",
    "It could also be computed with a table.",
    "On second thought, one step would have been enough.",
    "Oops, I skipped a step, but the result is the same.",
    "Another way: start from {o} and go on.",
    "Without the last step it would be {o}.",
    "Our answer is correct.",
    "The answer is not {o}.",
    "I doubt that it gets any easier.",
    "Actually, let me recompute: {a} + {b} = {v}.",
    "Or, in other words, all of them.",
    "No further steps are needed.",
    "So it was {o} before, and is more now.",
]


def _checks_itself(rng: random.Random) -> Member:
    """A right answer in a text that checks, doubts or comments on itself before or after it."""
    first, second = rng.sample(range(2, 500), 2)
    value, other = first + second, first + second + rng.randint(1, 50)
    mark, tail = rng.choice(
        [(rf"$\\boxed{{{value}}}$", ""), (rf"\\boxed{{{value}}}", ""), (str(value), f"\n#### {value}\n")]
    )
    opening = rng.choice(_OPENINGS).format(v=mark)
    after = rng.choice(_CONTINUATIONS).format(v=value, o=other, a=first, b=second)
    return Member(str(value), f"{opening}{tail or rng.choice([' ', chr(10), chr(10) * 2])}{after}", "right")


def _says_another_later(rng: random.Random) -> Member:
    """A right answer that the text replaces with another one."""
    gold, other = rng.sample(range(2, 999), 2)
    first = rng.choice([rf"\\boxed{{{gold}}}.", f"#### {gold}\n", f"The answer is {gold}."])
    second = rng.choice(
        [
            rf"So \\boxed{{{other}}}.",
            f"\n#### {other}",
            f"The answer is {other}.",
            rf"Final answer: ${other}$",
            f"<answer>{other}</answer>",
        ]
    )
    if "####" not in second and "box" not in second and "<" not in second:
        second = f"Wait. {second}"
    return Member(str(gold), f"{first} {second}", "wrong")


CLASSES: dict[str, Generator] = {
    "box-beside-other-relation": _beside_other_relation,
    "box-multiplied-by-words": _multiplied_by_words,
    "box-with-honest-surroundings": _honest_surroundings,
    "box-with-other-form": _other_form,
    "box-with-other-value": _other_value,
    "box-with-form-in-words": _form_in_words,
    "box-with-sign-or-unit": _signed_and_measured,
    "last-box-concludes": _last_box_concludes,
    "boxes-in-a-list": _boxes_in_a_list,
    "checks-itself": _checks_itself,
    "says-another-answer-later": _says_another_later,
    "mark-before-heading": _marked_before_heading,
    "marked-with-more": _marked_with_more,
    "marked-in-other-words": _marked_in_other_words,
    "marked-and-spoiled": _marked_and_spoiled,
    "last-sentence": _last_sentence,
    "last-sentence-without-answer": _last_sentence_without_answer,
}
