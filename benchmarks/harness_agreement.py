"""What lm-evaluation-harness says of the responses that tests compare this project's grader with.

`python benchmarks/harness_agreement.py` makes the responses, has the harness grade them in an environment of its own,
and writes `tests/grading/cases/harness.tsv`: one response per line with the metrics by which it is right. With
`--outputs FILE`, rows with `id`, `dataset`, `gold` and `response`, it writes verdicts by id to `harness_outputs.tsv`.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from environments import python_of

_ROOT = Path(__file__).parents[1]
_CASES = _ROOT / "tests" / "grading" / "cases"
_SIDE = _ROOT / "benchmarks" / "harness.py"
_EVERY = 4
"""Of the pairs of answers, one in so many is a response; of the ways to write a response, so many per problem."""
_PICTURES = {code: code + 0x2400 for code in range(0x20)}
_CODES = {picture: code for code, picture in _PICTURES.items()}


class Case(NamedTuple):
    """A response of a family of tasks, and how it is written."""

    family: str
    kind: str
    gold: str
    response: str


_GSM8K = {
    "goes on with another question": "{work}\n#### {gold}\n\nQuestion: Two cows have how many legs?\n#### 8",
    "dollar sign": "{work}\n#### ${gold}",
    "decimal places": "{work}\n#### {gold}.00",
    "unit": "{work}\n#### {gold} dollars",
    "full stop": "{work}\n#### {gold}.",
    "bold sentence": "{work}\n**Answer: {gold}**",
    "sentence": "{work}\nThe answer is {gold}.",
    "box and a remark": "{work}\nThe final answer is \\boxed{{{gold}}}. I checked it in 2 ways.",
    "conclusion": "{work}\nSo there are {gold} in all.",
    "contrast": "{work}\nSo it is {gold}, not {wrong}.",
    "no space": "{work}\n####{gold}",
    "thousands": "{work}\n#### {gold},000 thousandths",
    "truncated": "{half}",
    "headings": "#### Step 1\n{work}\n#### Step 2\nThe answer is {gold}.",
    "wrong": "{work}\n#### {wrong}",
    "wrong sentence": "{work}\nThe answer is {wrong}.",
    "wrong box": "{work}\n\\boxed{{{wrong}}}",
    "remark after the answer": "{work}\n#### {gold}\nThat is 1 more than {wrong}.",
}
_MATH = [
    "Both sides agree, so we get $\\boxed{{{answer}}}$.",
    "${answer}$",
    "We compare both sides.\nFinal Answer: The final answer is ${answer}$. I hope it is correct.",
    "We compare both sides. The answer is ${answer}$.",
    "We compare both sides and find\n\\[{answer}\\]",
    "So it is $\\boxed{{{answer}}}$, which holds in all 3 cases.",
]


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=Path, help="responses of models, which are recorded by their ids only")
    options = parser.parse_args()
    cases = [*_gsm8k_cases(), *_math_cases()]
    head = (
        "# Verdicts of lm-evaluation-harness, written by benchmarks/harness_agreement.py.\n"
        "# Solutions of GSM8K: Copyright (c) 2021 OpenAI, MIT License (text in gsm8k.LICENSE).\n"
        "# A control character is written as its picture (\u240a is a newline).\n"
        "family\tkind\tgold\tresponse\tright\n"
    )
    rows = [[*case, right] for case, right in zip(cases, _right(cases), strict=True)]
    (_CASES / "harness.tsv").write_text(head + _lines(rows), encoding="utf-8")
    if options.outputs:
        outputs = [json.loads(line) for line in options.outputs.read_text(encoding="utf-8").splitlines()]
        cases = [
            Case("gsm8k" if row["dataset"].startswith("gsm8k") else "math", "", row["gold"], row["response"])
            for row in outputs
        ]
        rows = [[row["id"], right] for row, right in zip(outputs, _right(cases), strict=True)]
        head = "# Verdicts of lm-evaluation-harness, written by benchmarks/harness_agreement.py.\nid\tright\n"
        (_CASES / "harness_outputs.tsv").write_text(head + _lines(rows), encoding="utf-8")


def _right(cases: Sequence[Case]) -> list[str]:
    """The metrics by which each response is right, separated by commas."""
    with tempfile.TemporaryDirectory() as folder:
        given, verdicts = Path(folder) / "cases.jsonl", Path(folder) / "verdicts.jsonl"
        given.write_text("".join(json.dumps(case._asdict()) + "\n" for case in cases), encoding="utf-8")
        subprocess.run([python_of("lm-eval"), "-P", _SIDE, given, verdicts], check=True)
        rows = [json.loads(line) for line in verdicts.read_text(encoding="utf-8").splitlines()]
    return [", ".join(name for name, is_right in row.items() if is_right) for row in rows]


def _gsm8k_cases() -> Iterator[Case]:
    """Solutions of GSM8K and changed ones, and each with its answer written in some other ways."""
    solutions = []
    for gold, response, _, why in _table("gsm8k.tsv"):
        yield Case("gsm8k", why, gold, response)
        if why == "reference solution":
            solutions.append((gold, response.rpartition("\n####")[0]))
    kinds = list(_GSM8K)
    for number, (gold, work) in enumerate(solutions):
        for step in range(_EVERY):
            kind = kinds[(_EVERY * number + step) % len(kinds)]
            half = work[: len(work) // 2]
            text = _GSM8K[kind].format(work=work, half=half, gold=gold, wrong=int(gold) - 1)
            yield Case("gsm8k", kind, gold, text)


def _math_cases() -> Iterator[Case]:
    """Pairs of answers: the first is expected, the second is written in one of several ways."""
    rows = [row for row in _table("answers.tsv") if row[3] != "undefined"]
    for number, (gold, answer, _, why) in enumerate(rows[::_EVERY]):
        yield Case("math", why, gold, _MATH[number % len(_MATH)].format(answer=answer))


def _table(name: str) -> list[list[str]]:
    lines = (_CASES / name).read_text(encoding="utf-8").split("\n")
    _, *rows = (line.split("\t") for line in lines if line and not line.startswith("# "))
    return [[cell.translate(_CODES) for cell in row] for row in rows]


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join("\t".join(cell.translate(_PICTURES) for cell in row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
