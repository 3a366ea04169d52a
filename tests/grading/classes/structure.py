"""Structure: inequalities and regions, components by name, matrices, arguments of functions, nested sets."""

import random

from tests.grading.classes.member import Generator, Member
from tests.grading.classes.notation import response


def _ends(generator: random.Random) -> tuple[int, int]:
    low, high = sorted(generator.sample(range(-30, 40), 2))
    return low, high


def unsolved_inequalities(generator: random.Random) -> Member:
    """The question, or a step on the way, where an interval or a union of intervals is expected."""
    low, high = _ends(generator)
    letter, factor = generator.choice("xxxtyn"), generator.randint(2, 9)
    middle, half = low + high, high - low
    quadratic = f"{letter}^2-{middle}{letter}+{low * high}".replace("--", "+").replace("+-", "-")
    product = f"({letter}-{low})({letter}-{high})".replace("--", "+")
    outside = rf"(-\infty,{low})\cup({high},\infty)"
    gold, sign = generator.choice([(outside, ">"), (outside, ">"), (f"({low},{high})", "<")])
    closed = generator.random() < 0.3
    if closed:
        gold = gold.replace(str(f"{low})"), f"{low}]").replace(f"({high}", f"[{high}")
        gold = gold.replace(f"({low},{high})", f"[{low},{high}]")
        sign = {">": r"\ge", "<": r"\le"}[sign]
    flipped = {">": "<", "<": ">", r"\ge": r"\le", r"\le": r"\ge"}[sign]
    answer = generator.choice(
        [
            f"{quadratic}{sign} 0",
            f"{product}{sign} 0",
            f"0 {flipped} {product}",
            f"{factor}({quadratic}){sign} 0",
            f"-({quadratic}){flipped} 0",
            rf"\left|2{letter}-({middle})\right|{sign} {half}",
            f"|2{letter}-({middle})|{sign} {half}",
            rf"\left|{letter}-\frac{{{middle}}}{{2}}\right|{sign} \frac{{{half}}}{{2}}",
            f"{letter}^2{sign} {middle}{letter}-({low * high})",
            rf"\{{{letter} : {product}{sign} 0\}}",
            rf"{letter}\in\{{t : (t-({low}))(t-({high})){sign} 0\}}",
        ]
    )
    return Member(gold, response(generator, answer), "wrong")


def regions(generator: random.Random) -> Member:
    """Intervals, unions and solved inequalities that describe the same part of the line."""
    low, high = _ends(generator)
    third, size = high + generator.randint(1, 9), generator.randint(2, 30)
    letter = generator.choice("xxxty")
    is_open = generator.random() < 0.5
    left, right = ("(", ")") if is_open else ("[", "]")
    less, more = ("<", ">") if is_open else (r"\le", r"\ge")
    choices = [
        [
            rf"(-\infty,{low}{right}\cup{left}{high},\infty)",
            rf"{left}{high},\infty)\cup(-\infty,{low}{right}",
            rf"{letter}{less} {low}\text{{ or }}{letter}{more} {high}",
            rf"{letter}\in(-\infty,{low}{right}\cup{left}{high},\infty)",
            f"{letter} {more} {high} or {letter} {less} {low}",
        ],
        [
            f"{left}{low},{high}{right}",
            f"{low}{less} {letter}{less} {high}",
            f"{high}{more} {letter}{more} {low}",
            rf"{letter}\in {left}{low},{high}{right}",
            rf"\{{{letter}\mid {low}{less} {letter}{less} {high}\}}",
        ],
        [rf"({low},\infty)", f"{letter}>{low}", f"{low}<{letter}", rf"(-\infty,{high})".replace(str(high), str(low))],
        [
            rf"(-\infty,{low})\cup({low},{high})\cup({high},\infty)",
            rf"\mathbb{{R}}\setminus\{{{low},{high}\}}",
            rf"\mathbb R \setminus \{{{high}, {low}\}}",
        ],
        [
            rf"(-\infty,{low})\cup({low},\infty)",
            rf"{letter}\ne {low}",
            rf"\mathbb{{R}}\setminus\{{{low}\}}",
            rf"{letter}<{low}\text{{ or }}{letter}>{low}",
        ],
        [rf"{left}-{size},{size}{right}", f"|{letter}|{less} {size}", f"-{size}{less} {letter}{less} {size}"],
        [rf"{left}{low},{third}{right}", rf"{left}{low},{high}]\cup[{high},{third}{right}"],
    ]
    forms = generator.choice(choices)
    gold, answer = generator.sample(
        forms[:3] if len(forms) == 4 and forms[0].endswith(r"\infty)") and ">" in forms[1] else forms, 2
    )
    return Member(gold, response(generator, answer), "right")


def other_regions(generator: random.Random) -> Member:
    """An end, a bracket, a direction or a part is another one."""
    low, high = _ends(generator)
    third = high + generator.randint(1, 9)
    gold, wrong = generator.choice(
        [
            (rf"(-\infty,{low})\cup({high},\infty)", rf"(-\infty,{low}]\cup({high},\infty)"),
            (rf"(-\infty,{low})\cup({high},\infty)", rf"x<{low}\text{{ or }}x>{third}"),
            (rf"(-\infty,{low})\cup({high},\infty)", rf"x<{low}\text{{ and }}x>{high}"),
            (rf"(-\infty,{low})\cup({high},\infty)", rf"({low},{high})"),
            (rf"(-\infty,{low})\cup({high},\infty)", rf"x>{high}"),
            (f"({low},{high})", rf"{low}<x\le {high}"),
            (f"({low},{high})", f"({low},{third})"),
            (f"({low},{high})", rf"({low},{high})\cup({high},{third})"),
            (f"({low},{high})", rf"x<{high}"),
            (f"[{low},{high}]", rf"({low},{high})"),
            (rf"[{low},\infty)", rf"x\le {low}"),
            (rf"[{low},\infty)", rf"x\ge {high}"),
            (rf"(-\infty,{low})\cup({low},\infty)", rf"x\ne {high}"),
            (rf"(-\infty,{low})\cup({low},\infty)", r"\mathbb{R}"),
            (rf"[{low},{high}]\cup[{third},\infty)", rf"[{low},\infty)"),
        ]
    )
    gold, wrong = generator.choice([(gold, wrong), (wrong, gold)])
    return Member(gold, response(generator, wrong), "wrong")


def _values(generator: random.Random, number: int) -> list[str]:
    """Different values, of which no two are opposite."""
    roots = [rf"\sqrt{{{each}}}" for each in (2, 3, 5, 7)]
    numbers = [str(each * generator.choice([1, -1])) for each in generator.sample(range(1, 60), number)]
    return [
        generator.choice([value, value, value, generator.choice(roots) + ""]) if place == 0 else value
        for place, value in enumerate(numbers)
    ]


def components_by_name(generator: random.Random) -> Member:
    """The components are named in the same order or in another one, with their own values or another's."""
    number = generator.choice([2, 2, 3])
    names = list("xyz"[:number]) if generator.random() < 0.6 else sorted(generator.sample("abcdmnpqrs", number))
    values = _values(generator, number)
    order = list(range(number))
    generator.shuffle(order)
    gold = f"({','.join(names)})=({','.join(values)})"
    is_right = generator.random() < 0.5
    mapped = [values[place] for place in order]
    if not is_right:
        mapped = mapped[1:] + mapped[:1]
    shown = [names[place] for place in order]
    answer = generator.choice(
        [
            f"({','.join(shown)})=({','.join(mapped)})",
            f"({', '.join(shown)}) = ({', '.join(mapped)})",
            rf"\left({','.join(shown)}\right)=\left({','.join(mapped)}\right)",
        ]
    )
    if generator.random() < 0.3:
        gold = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        answer = ", ".join(f"{name}={value}" for name, value in zip(shown, mapped, strict=True))
    return Member(gold, response(generator, answer), "right" if is_right else "wrong")


def _matrix(generator: random.Random, rows: list[list[str]]) -> str:
    kind = generator.choice(["pmatrix", "bmatrix"])
    inner = r" \\ ".join(" & ".join(row) for row in rows)
    return rf"\begin{{{kind}}} {inner} \end{{{kind}}}"


def _entries(generator: random.Random) -> list[list[str]]:
    height, width = generator.choice([(2, 2), (2, 3), (3, 2), (3, 3)])
    return [[str(generator.randint(-30, 60)) for _ in range(width)] for _ in range(height)]


def ragged_matrices(generator: random.Random) -> Member:
    """The entries of the expected matrix in rows of other lengths, or in another order."""
    rows = _entries(generator)
    flat = [entry for row in rows for entry in row]
    width = len(rows[0])
    cut = generator.randint(1, len(flat) - 1)
    if cut == width and len(rows) == 2:
        cut -= 1
    broken = generator.choice([[flat[:cut], flat[cut:]], [[entry] for entry in flat], [flat]])
    return Member(_matrix(generator, rows), response(generator, _matrix(generator, broken)), "wrong")


def matrices(generator: random.Random) -> Member:
    """The same matrix in another notation."""
    rows = _entries(generator)
    array = (
        r"\left(\begin{array}{"
        + "c" * len(rows[0])
        + "}"
        + r"\\".join("&".join(row) for row in rows)
        + r"\end{array}\right)"
    )
    halves = [[rf"\frac{{{2 * int(entry)}}}{{2}}" for entry in row] for row in rows]
    factor = generator.randint(2, 9)
    multiples = [[str(factor * int(entry)) for entry in row] for row in rows]
    answer = generator.choice(
        [
            _matrix(generator, rows),
            array,
            _matrix(generator, halves),
            rf"\frac{{1}}{{{factor}}}{_matrix(generator, multiples)}",
        ]
    )
    return Member(
        _matrix(generator, rows), response(generator, f"{generator.choice(['', 'A=', 'M = '])}{answer}"), "right"
    )


def _function(generator: random.Random, variable: str) -> str:
    first, second = generator.randint(2, 30), generator.randint(2, 90)
    return generator.choice(
        [
            f"{first}{variable}+{second}",
            f"{variable}^2-{second}",
            rf"\frac{{{first}}}{{{variable}+{second}}}",
            f"{first}^{variable}",
        ]
    )


def arguments_of_functions(generator: random.Random) -> Member:
    """A value of the function at another place, or a function of another variable."""
    name = generator.choice("fghp")
    value = _function(generator, "x")
    first, second = generator.sample(range(2, 90), 2)
    gold, answer = generator.choice(
        [
            (f"{name}(x)={value}", f"{name}(y)={value}"),
            (f"{name}(x)={value}", f"{name}(t)={value}"),
            (f"{name}(x) = {value}", rf"{name}(2x) = {value}"),
            (f"{name}({first})={second}", f"{name}({second})={second}"),
            (f"{name}({first})", f"{name}({second})"),
            (f"{name}(x)+{first}", f"{name}(y)+{first}"),
            (f"{first}{name}(x)", f"{first}{name}(z)"),
            (f"{name}(x)={value}", f"{generator.choice('qruv')}(x)={value}"),
        ]
    )
    return Member(gold, response(generator, answer), "wrong")


def names_of_functions(generator: random.Random) -> Member:
    """The same function with its name, called y, or without a name."""
    name = generator.choice("fghp")
    value = _function(generator, "x")
    gold, answer = generator.sample([f"{name}(x)={value}", f"y={value}", value, f"{name}(x) = {value}"], 2)
    return Member(gold, response(generator, answer), "right")


def nested_sets(generator: random.Random) -> Member:
    """Members in a set of their own."""
    first, second, third = (str(each) for each in generator.sample(range(-40, 99), 3))
    flat = rf"\{{{first},{second}\}}"
    gold, answer = generator.choice(
        [
            (flat, rf"\{{\{{{first}\}},{second}\}}"),
            (flat, rf"\{{\{{{first}\}},\{{{second}\}}\}}"),
            (flat, rf"\{{\{{{first},{second}\}}\}}"),
            (flat, rf"\{{{first},\{{{second}\}}\}}"),
            (first, rf"\{{{first},\{{{first}\}}\}}"),
            (rf"\{{{first},{second},{third}\}}", rf"\{{\{{{first},{second}\}},{third}\}}"),
            (rf"{first},{second}", rf"{first},\{{{second}\}}"),
        ]
    )
    gold, answer = generator.choice([(gold, answer), (answer, gold)])
    return Member(gold, response(generator, answer), "wrong")


def sets(generator: random.Random) -> Member:
    """Sets and lists in another order, and sets of sets."""
    values = [str(each) for each in generator.sample(range(-40, 99), 3)]
    other = generator.sample(values, 3)
    forms = [r"\{{}\}", "{}", r"\left\{{}\right\}", r"x\in\{{}\}"]
    gold, answer = generator.choice(
        [
            (
                generator.choice(forms).replace("{}", ",".join(values)),
                generator.choice(forms).replace("{}", ", ".join(other)),
            ),
            (rf"\{{\{{{values[0]}\}},{values[1]}\}}", rf"\{{{values[1]}, \{{{values[0]}\}}\}}"),
            (rf"\{{\{{{values[0]},{values[1]}\}}\}}", rf"\{{\{{{values[1]},{values[0]}\}}\}}"),
            (rf"\{{{values[0]}\}}", values[0]),
        ]
    )
    return Member(gold, response(generator, answer), "right")


CLASSES: dict[str, Generator] = {
    "unsolved-inequalities": unsolved_inequalities,
    "regions": regions,
    "other-regions": other_regions,
    "components-by-name": components_by_name,
    "ragged-matrices": ragged_matrices,
    "matrices": matrices,
    "arguments-of-functions": arguments_of_functions,
    "names-of-functions": names_of_functions,
    "nested-sets": nested_sets,
    "sets": sets,
}
