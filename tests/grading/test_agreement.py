"""Agreement with the verdicts that lm-evaluation-harness gave (benchmarks/harness_agreement.py)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from components.grading.flexible import grade_flexibly
from components.grading.verifier import Submission, Verifier
from components.shared.answer_policy import AnswerPolicy
from tests.grading.tables import table

DOCUMENT = Path("benchmarks/agreement.md")
POLICIES = {"gsm8k": AnswerPolicy.MARKED, "math": AnswerPolicy.BOXED}


def _is_compared(metric: str, response: str) -> bool:
    """Whether a metric of MATH is made for such a response."""
    if metric == "minerva_math exact_match":
        return "Final Answer: The final answer is" in response
    if metric == "hendrycks_math exact_match":
        return response.startswith("$") and response.endswith("$") and response.count("$") == 2
    return True


def _verdicts(
    verify: Verifier, family: str, cases: Sequence[tuple[str, str, str]]
) -> Iterator[tuple[int, str, bool, bool]]:
    """For each case and metric whether it is right here and there; a case is a gold, a response and metrics."""
    submissions = [Submission(gold, response, POLICIES[family]) for gold, response, _ in cases]
    strict = verify(submissions)
    flexible = grade_flexibly(verify, submissions, strict)
    metrics = {
        "gsm8k": {"gsm8k strict-match": strict, "gsm8k flexible-extract": flexible},
        "math": dict.fromkeys(
            ("minerva_math math_verify", "minerva_math exact_match", "hendrycks_math exact_match"), flexible
        ),
    }
    for index, (_, response, right) in enumerate(cases):
        for metric, grades in metrics[family].items():
            if _is_compared(metric, response):
                yield index, metric, grades[index].verdict == "right", metric in right.split(", ")


def _documented(heading: str) -> dict[tuple[str, ...], list[str]]:
    """The rows of the last table below a heading of the document: its cells by their first ones."""
    section = DOCUMENT.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {tuple(row[:2]): row for row in rows[2:]}


def test_verdicts_differ_from_those_of_the_harness_only_as_documented(verify: Verifier) -> None:
    """On hand-made responses, class by class; a text-comparing metric of MATH has one class."""
    rows = table("harness.tsv")
    here, there = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for family in POLICIES:
        own = [row for row in rows if row[0] == family]
        for index, metric, is_right, was_right in _verdicts(verify, family, [(row[2], row[3], row[4]) for row in own]):
            kind = "any" if family == "math" and metric.endswith("exact_match") else own[index][1]
            here[metric, kind] += is_right and not was_right
            there[metric, kind] += was_right and not is_right
    documented = {key: (int(row[2]), int(row[3])) for key, row in _documented("Hand-made responses").items()}
    assert {key: (here[key], there[key]) for key in here if here[key] or there[key]} == documented
