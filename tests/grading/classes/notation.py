r"""Notation: arguments of functions, text that is not understood, formatting, short forms, and chains of equations."""

import random
from math import comb, factorial, gcd

from tests.grading.classes.member import Generator, Member

_FUNCTIONS = ["sin", "cos", "tan", "ln", "log", "sec", "cot"]
_VARIABLES = ["x", "t", "y", r"\theta", r"\alpha"]


def response(generator: random.Random, answer: str) -> str:
    """Return a response that ends in a boxed answer."""
    before = generator.choice(
        [
            "",
            "We add both sides.\n",
            "Let us compute. ",
            "First, $a+b=12$ and $c=3$.\n\n",
            "**Solution.** By symmetry, ",
        ]
    )
    return before + generator.choice(
        [
            rf"\boxed{{{answer}}}",
            rf"$\boxed{{{answer}}}$.",
            rf"The answer is $\boxed{{{answer}}}$.",
            "\\[\n\\boxed{" + answer + "}\n\\]",
            f"So we get \\(\\boxed{{{answer}}}\\).",
        ]
    )


def number(generator: random.Random) -> str:
    """Return a number that is no 0 or 1, as an integer, a fraction or a decimal."""
    whole, other = generator.randint(2, 999), generator.choice([7, 9, 11, 13])
    sign = generator.choice(["", "", "-"])
    forms = [str(whole), str(whole), rf"\frac{{{whole * other + 1}}}{{{other}}}", f"{whole}.{generator.randint(1, 9)}"]
    return sign + generator.choice(forms)


def expression(generator: random.Random) -> str:
    """Return a number, a root or a polynomial."""
    first, second = generator.randint(2, 9), generator.randint(2, 30)
    root = generator.choice([2, 3, 5, 6, 7, 10])
    variable = generator.choice("xyznkt")
    return generator.choice(
        [
            number(generator),
            rf"{first}\sqrt{{{root}}}",
            rf"{second}\pi",
            f"{first}{variable}^2+{second}",
            rf"\frac{{{second}+\sqrt{{{root}}}}}{{{first}}}",
            f"{second}-{first}{variable}",
        ]
    )


def _product(generator: random.Random) -> tuple[str, str, str, str]:
    """Two functions and an argument of each; all four are numbers, or all in one variable."""
    one, other = generator.sample(_FUNCTIONS, 2) if generator.random() < 0.7 else ["ln", "ln"]
    if generator.random() < 0.5:
        first, second = generator.sample(range(2, 30), 2)
        return one, str(first), other, str(second)
    variable = generator.choice(_VARIABLES)
    factors = generator.sample(range(2, 12), 2)
    return one, f"{factors[0]}{variable}", other, f"{factors[1]}{variable}"


def products_of_functions(generator: random.Random) -> Member:
    """The product is expected, and a function of a product is given; or the other way around."""
    one, first, other, second = _product(generator)
    dot = generator.choice([r"\cdot", r"\times", ""])
    product = generator.choice([rf"\{one} {first}{dot}\{other} {second}", rf"\{one}({first})\{other}({second})"])
    nested = generator.choice(
        [
            rf"\{one}({first}\{other} {second})",
            rf"\{one}({first}\cdot\{other}({second}))",
            rf"\{one}({first})+\{other}({second})",
        ]
    )
    gold, answer = generator.choice([(product, nested), (nested, product)])
    return Member(gold, response(generator, answer), "wrong")


def products_of_functions_in_other_notation(generator: random.Random) -> Member:
    """With and without brackets and dots, in either order, with powers."""
    one, first, other, second = _product(generator)
    power = generator.choice(["", "", "^2", "^{3}"])
    forms = [
        rf"\{one}{power} {first} \{other} {second}",
        rf"\{one}{power} {first}\cdot\{other} {second}",
        rf"\{one}{power} {first} \times \{other} {second}",
        rf"\{one}{power}({first})\{other}({second})",
        rf"\{other} {second} \cdot \{one}{power}({first})",
        rf"\{other}({second})\{one}{power} {first}",
        rf"\{one}{power}\left({first}\right)\cdot \{other} {{{second}}}",
    ]
    if power:
        forms.append(rf"(\{one} {first}){power}\{other} {second}")
    gold, answer = generator.sample(forms, 2)
    return Member(gold, response(generator, answer), "right")


def text_that_is_not_understood(generator: random.Random) -> Member:
    """The expected answer with something in it that a reader cannot skip."""
    gold = generator.choice([str(generator.randint(2, 999)), number(generator)])
    other = generator.randint(2, 9)
    letter = generator.choice("abcknm")
    sign = generator.choice([r"\oplus", r"\ominus", r"\otimes", r"\odot", r"\star", r"\circ", r"\diamond", r"\ast\ast"])
    command = generator.choice(
        [r"\mystery", r"\wp", r"\aleph", r"\nabla", r"\flat", r"\natural", r"\top", r"\dagger", r"\Im", r"\complement"]
    )
    answer = generator.choice(
        [
            f"{gold}_{letter}",
            rf"{gold}_{{{letter}}}",
            rf"{gold}_{{\text{{{generator.choice(['ten', 'old', 'max', 'left'])}}}}}",
            f"{gold}{sign} {other}",
            f"{other}{sign} {gold}",
            f"{gold}{command}",
            f"{command} {gold}",
            f"{command}{{{gold}}}",
            f"{gold}^{{{command}}}",
            rf"{gold} \mod {other}".replace("-", "1"),
            rf"{gold}\pmod{{{generator.randint(1, 2)}}}",
            rf"{gold}\;\underset{{{other}}}{{+}}",
            rf"{gold}^*",
            rf"{gold}\mid {other}",
            rf"{gold}\parallel {other}",
            rf"\neg {gold}",
            rf"{gold}\to {other}",
            rf"{gold}\rightarrow {letter}",
            rf"{gold}\%\%",
            rf"\overset{{{other}}}{{{gold}}}",
        ]
    )
    return Member(gold, response(generator, answer), "wrong")


def minus_before_text(generator: random.Random) -> Member:
    """A sign before a command that holds the number."""
    value = generator.randint(2, 9999)
    style = generator.choice(["text", "mathrm", "textbf", "mathbf", "mbox", "textit"])
    answer = generator.choice(
        [
            rf"-\{style}{{{value}}}",
            rf"-\{style}{{ {value}}}",
            rf"- \{style}{{ {value} }}",
            rf"\{style}{{-}}{value}",
            rf"-{{{value}}}",
        ]
    )
    gold, verdict = generator.choice([(str(value), "wrong"), (str(-value), "right")])
    return Member(gold, response(generator, answer), verdict)


def formatting(generator: random.Random) -> Member:
    """Fonts, sizes, spaces, environments and words that say that this is the answer."""
    gold = expression(generator)
    forms = [
        *(
            rf"\{style}{{{gold}}}"
            for style in ("underline", "mathsf", "mathbf", "mathit", "mathrm", "boldsymbol", "mathtt")
        ),
        *(rf"{{\{style} {gold}}}" for style in ("bf", "rm", "it", "large", "Large", "huge", "displaystyle", "small")),
        *(rf"\{style} {gold}" for style in ("large", "textstyle", "displaystyle", "Large", "bf", "rm", "normalsize")),
        *(f"{space}{gold}{space}" for space in (r"\,", r"\;", r"\ ", r"\quad ", "~", r"\! ", "  ")),
        *(
            f"{sign} {gold}"
            for sign in ("=", r"\therefore", r"\Rightarrow", r"\implies", r"\text{Answer: }", r"\text{Answer:}")
        ),
        *(
            rf"{gold}{mark}"
            for mark in (r"\checkmark", r"\ \checkmark", ".", r"\quad\checkmark", r"\\", r"\blacksquare")
        ),
        *(rf"\text{{{words}}}{gold}" for words in ("Ans: ", "The answer is ", "Final answer: ", "Result: ")),
        *(rf"\begin{{{env}}}{gold}\end{{{env}}}" for env in ("aligned", "align*", "gathered", "equation*", "split")),
        rf"\begin{{aligned}} & {gold} \end{{aligned}}",
        rf"\begin{{aligned}} &= {gold} \\ \end{{aligned}}",
        rf"\left.{gold}\right.",
        rf"\bigl({gold}\bigr)",
        rf"\left({gold}\right)",
        rf"{{{gold}}}",
        rf"\mathbf{{{gold}}}.",
        rf"\color{{blue}}{{{gold}}}",
        rf"\textcolor{{red}}{{{gold}}}",
        gold.replace(r"\frac", r"\tfrac").replace("+", r"\,+\,") + r"\,",
        gold.replace(r"\frac", r"\dfrac").replace("-", "\u2212"),
    ]
    return Member(gold, response(generator, generator.choice(forms)), "right")


def formatting_of_another_answer(generator: random.Random) -> Member:
    """The same around an answer that is wrong."""
    honest = formatting(generator)
    whole = generator.randint(2, 999)
    gold = generator.choice([f"{honest.gold}+{whole}", rf"\frac{{{honest.gold}}}{{{whole}}}", f"-({honest.gold})"])
    return Member(gold, honest.response, "wrong")


def short_forms(generator: random.Random) -> Member:
    r"""Commands whose arguments have no braces."""
    small, other = generator.randint(2, 9), generator.randint(2, 9)
    large = generator.randint(6, 9)
    choices = [
        (rf"\sqrt[{small}]{{{other}}}", rf"\sqrt[{small}]{other}"),
        (rf"{other}^{{1/{small}}}", rf"\sqrt[{small}]{other}"),
        (str(comb(large, 2)), rf"\binom{large}2"),
        (str(comb(large, 3)), rf"\dbinom{large}{{3}}"),
        (str(comb(large, 4)), rf"\tbinom{{{large}}}4"),
        (rf"\ln {small}", rf"\log_e {small}"),
        (rf"\ln {small}", rf"\log_e({small})"),
        (rf"\log_{{{small}}} {other}", rf"\log_{small} {other}"),
        (rf"\frac{{\ln {other}}}{{\ln {small}}}", rf"\log_{small}{other}"),
        (rf"\frac{{{small}}}{{{other}}}", rf"\frac{small}{other}"),
        (rf"\frac{{{small}}}{{{other}}}", rf"\tfrac{small}{{{other}}}"),
        (rf"\frac{{\pi}}{{{other}}}", rf"\frac\pi{other}"),
        (rf"\frac{{\sqrt{{{small}}}}}{{{other}}}", rf"\frac{{\sqrt{small}}}{other}"),
        (rf"{large}\sqrt{{{small}}}", rf"{large}\sqrt{small}"),
        (rf"\sqrt{{{small}}}+{large}", rf"{large}+\sqrt {small}"),
        (str(factorial(small)), f"{small}!"),
        (rf"\log {large}{small}", rf"\log_{{10}} {large}{small}"),
        (rf"{small}^{{{other}}}", f"{small}^{other}"),
        (rf"{small}^{{{other}}}", f"{small}^{{ {other} }}"),
        (rf"{small}x^{{{large}{other}}}", f"{small}x^{{{large}{other}}}"),
        (rf"\sqrt{{{large}{small}}}", f"\u221a{large}{small}"),
        (rf"\sqrt{{{large}{small}}}", f"\u221a({large}{small})"),
        (rf"\sqrt{{{large}{small}}}", f"sqrt({large}{small})"),
    ]
    gold, answer = generator.choice(choices)
    factor = generator.randint(2, 30)
    wrap = generator.choice(["{}", "-{}", f"{factor}+{{}}", f"{{}}-{factor}", rf"{factor}\cdot {{}}"])
    wrap = "{}" if "+" in gold else wrap
    return Member(wrap.replace("{}", gold), response(generator, wrap.replace("{}", answer)), "right")


def _true_chain(generator: random.Random) -> tuple[str, str]:
    """Sides of a true equation, and the value that it ends in."""
    one, other = generator.randint(2, 99), generator.randint(2, 99)
    letters = generator.sample("abcmnpqrst", 3)
    root = generator.randint(2, 20)
    sides: list[tuple[str, object]] = [
        (f"{one}+{other}", one + other),
        (rf"{one}\cdot {other}", one * other),
        (rf"{one} \times {other}", one * other),
        (f"{one}-{other}", one - other),
        (rf"\gcd({one},{other})", gcd(one, other)),
        (rf"\gcd({2 * one},{2 * other})", 2 * gcd(one, other)),
        (rf"\operatorname{{lcm}}({one},{other})", one * other // gcd(one, other)),
        (rf"\binom{{{root}}}{{2}}", comb(root, 2)),
        (rf"\sqrt{{{root * root}}}", root),
        (rf"\sqrt{{{root * root}}}+{one}", root + one),
        (r"e^{i\pi}", -1),
        (r"e^{i\pi}+1", 0),
        (r"\sin^2(1)+\cos^2(1)", 1),
        (rf"\log_2 {2**root}", root),
        (f"{letters[0]}+{letters[1]}", one + other),
        (f"{letters[0]}-{letters[1]}", one - other),
        (f"{letters[0]}{letters[1]}", one * other),
        (f"{letters[0]}+{letters[1]}+{letters[2]}", one + 2 * other),
        (f"{letters[0]}^2+{letters[1]}^2", one * one + other),
        (f"f({one})", other),
        (f"f({one})+g({other})", one),
        (f"{letters[0]}_{{{root}}}", one),
        (f"{letters[0]}_1+{letters[0]}_2", one),
        (r"\angle ABC", one),
        (f"P({one})", other),
        (rf"|{letters[0]}+{letters[1]}|", one),
        (rf"\frac{{{letters[0]}}}{{{letters[1]}}}", one),
        (r"\max(a,b)", one),
        (rf"\lfloor {one}.5\rfloor", one),
        ("AB+BC", one),
    ]
    side, value = generator.choice(sides)
    return side, str(value)


def chains_that_end_in_the_answer(generator: random.Random) -> Member:
    """A true equation, or one for several unknowns, whose last side is the answer."""
    side, value = _true_chain(generator)
    between = generator.choice(["", "", f"={int(value) + 3}-3", f"=2\\cdot {value}-{value}".replace("--", "+")])
    space = generator.choice(["", " "])
    return Member(value, response(generator, f"{side}{between}{space}={space}{value}"), "right")


def unsolved_equations(generator: random.Random) -> Member:
    """An equation that is still to be solved, whose last side is the answer."""
    value, root, letter = generator.randint(2, 400), generator.randint(2, 20), generator.choice("abnxyz")
    side = generator.choice(
        [
            f"{letter}+{root}",
            f"{root}{letter}",
            f"{letter}^{root}",
            rf"\frac{{{letter}}}{{{root}}}",
            rf"\sqrt{{{letter}}}",
            rf"|{letter}|",
            rf"2^{{{letter}}}",
        ]
    )
    return Member(str(value), response(generator, f"{side}={value}"), "wrong")


def chains_with_false_steps(generator: random.Random) -> Member:
    """Only the last side of a chain counts, whatever the others are worth."""
    value, other, last = generator.sample(range(2, 400), 3)
    name = generator.choice(["x = ", "z=", "n = ", r"\theta = ", "x_1 = ", ""])
    step = generator.choice([str(other), f"{other} + {value}", rf"\sqrt{{{other * other + 1}}}", rf"\ln({other})"])
    is_right = generator.random() < 0.5
    chain = f"{name}{step} = {value if is_right else last}"
    return Member(str(value), response(generator, chain), "right" if is_right else "wrong")


def named_points(generator: random.Random) -> Member:
    """A point or vector with its name, and the values in order."""
    values = [str(generator.randint(-20, 20)) for _ in range(generator.choice([2, 2, 3]))]
    inner = ",".join(values)
    gold = generator.choice([f"({inner})", f"({', '.join(values)})", rf"\left({inner}\right)"])
    name = generator.choice("ABCPQRM")
    vector = generator.choice("vuabw")
    letters = ",".join("xyz"[: len(values)])
    column = r"\\".join(values)
    answer = generator.choice(
        [
            f"{name}({inner})",
            f"{name} = ({inner})",
            f"{name}=({inner})",
            rf"{name}\left({inner}\right)",
            rf"\vec {vector}=({inner})",
            rf"\vec{{{vector}}} = ({inner})",
            rf"\mathbf{{{vector}}}=({inner})",
            rf"\overrightarrow{{AB}}=({inner})",
            f"({letters})=({inner})",
            rf"({letters}) = \left({inner}\right)",
            rf"\vec{{{vector}}}=\begin{{pmatrix}}{column}\end{{pmatrix}}",
            rf"\langle {inner}\rangle",
            rf"\text{{{name}}}({inner})",
        ]
    )
    return Member(gold, response(generator, answer), "right")


def products_and_squares_of_functions(generator: random.Random) -> Member:
    """Functions with brackets, in sums, products and powers."""
    value = generator.randint(2, 40)
    variable = generator.choice([str(value), *_VARIABLES])
    factor = generator.randint(2, 30)
    gold, answer = generator.choice(
        [
            ("1", rf"\sin^2({variable})+\cos^2({variable})"),
            ("1", rf"\sin({variable})^2+\cos({variable})^2"),
            (str(factor), rf"{factor}\sin^2({variable})+{factor}\cos^2({variable})"),
            (
                rf"\sin(2{variable})" if variable in _VARIABLES else rf"\sin({2 * value})",
                rf"2\sin({variable})\cos({variable})",
            ),
            (rf"\tan({variable})", rf"\frac{{\sin({variable})}}{{\cos({variable})}}"),
            (rf"{factor}\ln({variable})", rf"\ln({variable})\cdot {factor}"),
            (rf"\cos^2({variable})-\sin^2({variable})", rf"2\cos^2({variable})-1"),
            (rf"\sec^2({variable})", rf"1+\tan^2({variable})"),
            (rf"{factor}e^{{{variable}}}", rf"\exp({variable})\cdot {factor}"),
            (rf"\ln^2({variable})", rf"(\ln {variable})^2"),
            (rf"\sin {variable}\cos {variable}", rf"\frac{{\sin(2\cdot {variable})}}{{2}}"),
        ]
    )
    return Member(gold, response(generator, answer), "right")


CLASSES: dict[str, Generator] = {
    "products-of-functions": products_of_functions,
    "products-of-functions-in-other-notation": products_of_functions_in_other_notation,
    "products-and-squares-of-functions": products_and_squares_of_functions,
    "text-that-is-not-understood": text_that_is_not_understood,
    "minus-before-text": minus_before_text,
    "formatting": formatting,
    "formatting-of-another-answer": formatting_of_another_answer,
    "short-forms": short_forms,
    "chains-that-end-in-the-answer": chains_that_end_in_the_answer,
    "unsolved-equations": unsolved_equations,
    "chains-with-false-steps": chains_with_false_steps,
    "named-points": named_points,
}
