"""The scores of an evaluation: statistics of its records, with 95 % confidence intervals.

A table has one measure of the greedy or the sampled records: for all, by source, and within each source by subject,
level, length of the question and number of steps of the reference solution. Samples of one problem are not independent,
so intervals count problems, not samples.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

from components.evaluate.estimators import maj_at_k, pass_at_k
from components.grading.parsing import parse
from components.shared.statistics import mean_interval, score, wilson_interval

Record = Mapping[str, Any]
Records = Sequence[Record]

_MAX_ANSWER_CHARACTERS = 300
"""A longer answer is not parsed: it votes as it is written."""


def scores(records: Records, *, num_samples: int, temperature: float) -> dict[str, Any]:
    """Return the scores of records; an unscorable answer counts as not right, and is also counted separately."""
    greedy = [record for record in records if record["sample"] == 0]
    sampled = [record for record in records if record["sample"] > 0]

    def sampled_table(measure: Callable[[Records], dict[str, Any]]) -> dict[str, Any] | None:
        return _table(sampled, measure) if sampled else None

    accuracy = sampled_table(partial(_mean_accuracy, is_right=_is_right))
    settings = {"num_samples": num_samples, "temperature": temperature}
    return {
        "greedy": _table(greedy, partial(_accuracy, is_right=_is_right)),
        "flexible": {
            **_table(greedy, partial(_accuracy, is_right=_is_flexibly_right)),
            "sampled": sampled_table(partial(_mean_accuracy, is_right=_is_flexibly_right)),
        },
        "sampled": {**settings, **accuracy} if accuracy else None,
        "pass_at_k": sampled_table(partial(_estimate_each_k, estimate=_pass_at_k)),
        "maj_at_k": sampled_table(partial(_estimate_each_k, estimate=_maj_at_k)),
        "mean_length_tokens": fmean(record["num_tokens"] for record in greedy),
        "worked_fraction": fmean(record["worked"] for record in greedy),
        "truncated_fraction": fmean(map(_is_truncated, greedy)),
        "truncated": _shares(greedy, _is_truncated),
        "unanswered": _shares(greedy, lambda record: record["finished"] and record["extracted"] is None),
        "unscorable": _shares(greedy, lambda record: record["verdict"] == "unscorable"),
        "tools": _tool_use(greedy) if any("turns" in record for record in greedy) else None,
        "reasons": _with_sources(greedy, _count_reasons),
    }


_LENGTHS = {25: "0-24", 50: "25-49", 100: "50-99"}
"""Names of length groups in words, by the first length that is not in the group."""
_MOST_STEPS = 8
"""Solutions with so many steps or more are one group."""


def _length(record: Record) -> str:
    """Return the length of the question in words, which does not depend on a tokenizer or prompt."""
    num_words = len(record["question"].split())
    return next((name for end, name in _LENGTHS.items() if num_words < end), "100+")


def _steps(record: Record) -> int | str | None:
    """Return the number of steps of the reference solution, None if it is unknown."""
    steps: int | None = record["num_steps"]
    if steps is None or steps < _MOST_STEPS:
        return steps
    return f"{_MOST_STEPS}+"


_GROUPINGS: dict[str, Callable[[Record], Any]] = {
    "by_subject": itemgetter("subject"),
    "by_level": itemgetter("level"),
    "by_length": _length,
    "by_steps": _steps,
}


def _table(records: Records, measure: Callable[[Records], dict[str, Any]]) -> dict[str, Any]:
    """Return the measure of all records, of each source, and of each group of `_GROUPINGS` within a source."""
    table = _with_sources(records, measure)
    for name, key in _GROUPINGS.items():
        table[name] = _measure_groups(records, itemgetter("source"), partial(_measure_groups, key=key, measure=measure))
    return table


def _with_sources(records: Records, measure: Callable[[Records], Any]) -> dict[str, Any]:
    """Return the measure of all records, and that of each source."""
    return {"all": measure(records), "by_source": _measure_groups(records, itemgetter("source"), measure)}


def _measure_groups(
    records: Records, key: Callable[[Record], Any], measure: Callable[[Records], Any]
) -> dict[str, Any]:
    """Return the measure of each group of records that have the same key."""
    return {name: measure(rows) for name, rows in _grouped(records, key).items()}


def _grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[str, list[Record]]:
    """Return the records by the text of their key, `2` before `10`; records without a key are left out."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        value = key(record)
        if value not in (None, ""):
            groups[str(value)].append(record)
    return {name: groups[name] for name in sorted(groups, key=_natural_order)}


def _natural_order(name: str) -> tuple[int, str]:
    number = re.match(r"\d+", name)
    return int(number.group()) if number else 0, name


def _count_reasons(records: Records) -> dict[str, dict[str, int]]:
    """Return how often each verdict had each reason, the most frequent reason first."""
    reasons: dict[str, dict[str, int]] = {"right": {}, "wrong": {}, "unscorable": {}}
    counts = Counter((record["verdict"], record["reason"]) for record in records)
    for (verdict, reason), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        reasons[verdict][reason] = count
    return reasons


def _tool_use(records: Records) -> dict[str, Any]:
    """Return how often, by source, the model called the tool and the environment failed, and means per answer."""

    def means(quantity: Callable[[Record], float]) -> dict[str, Any]:
        return _with_sources(records, lambda rows: fmean(map(quantity, rows)))

    return {
        "with_call": _shares(records, lambda record: _num_calls(record) > 0),
        "failed": _shares(records, lambda record: record["failure"] is not None),
        "calls_per_answer": means(_num_calls),
        "turns_per_answer": means(lambda record: len(record["turns"])),
        "environment_tokens_per_answer": means(itemgetter("num_environment_tokens")),
    }


def _num_calls(record: Record) -> int:
    return sum(turn["observation"] != "" for turn in record["turns"])


def _is_truncated(record: Record) -> bool:
    """Return whether a limit cut an answer off; one whose environment failed is neither finished nor truncated."""
    return not record["finished"] and record.get("failure") is None


def _is_right(record: Record) -> bool:
    return bool(record["verdict"] == "right")


def _is_flexibly_right(record: Record) -> bool:
    return bool(record["flexible"]["verdict"] == "right")


def _accuracy(records: Records, *, is_right: Callable[[Record], bool]) -> dict[str, Any]:
    return score(sum(map(is_right, records)), len(records))


def _shares(records: Records, condition: Callable[[Record], bool]) -> dict[str, Any]:
    """Return the share of records that meet a condition, with its interval: of all records, and by source."""

    def share(rows: Records) -> dict[str, Any]:
        count, total = sum(map(condition, rows)), len(rows)
        interval = list(wilson_interval(count, total))
        return {"count": count, "total": total, "fraction": count / total, "interval": interval}

    return _with_sources(records, share)


def _mean_accuracy(records: Records, *, is_right: Callable[[Record], bool]) -> dict[str, Any]:
    """Return the mean over problems of the share of right samples."""
    means = [fmean(map(is_right, samples)) for samples in _by_problem(records)]
    return {**_mean_over_problems(means, len(records)), "samples": len(records)}


def _estimate_each_k(records: Records, *, estimate: Callable[[Records, int], float]) -> dict[str, Any]:
    """Return an estimate for k = 1, 2, 4 and so on, up to the number of samples of the problem with the fewest."""
    problems = _by_problem(records)
    by_k, k = {}, 1
    while k <= min(map(len, problems)):
        by_k[str(k)] = _mean_over_problems([estimate(samples, k) for samples in problems], len(records) / k)
        k *= 2
    return by_k


def _pass_at_k(samples: Records, k: int) -> float:
    return pass_at_k(len(samples), sum(map(_is_right, samples)), k)


def _maj_at_k(samples: Records, k: int) -> float:
    wrong = Counter(_wrong_vote(record) for record in samples if not _is_right(record))
    num_without_answer = wrong.pop(None, 0)
    return maj_at_k(sum(map(_is_right, samples)), tuple(sorted(wrong.values())), num_without_answer, k)


def _wrong_vote(record: Record) -> Any:
    """Return the key under which a wrong answer is counted: its number or normalized text; None without an answer."""
    # Not compared by algebra: the votes of one wrong answer in two notations may be split.
    answer = record["extracted"]
    if answer is None or len(answer) > _MAX_ANSWER_CHARACTERS:
        return answer
    parsed = parse(answer)
    return parsed.number.value if parsed.number else parsed.text


def _by_problem(records: Records) -> list[list[Record]]:
    return list(_grouped(records, itemgetter("id")).values())


def _mean_over_problems(means: Sequence[float], num_answers: float) -> dict[str, Any]:
    """Return the mean over problems with its interval; the estimates are from `num_answers` answers, or groups of k."""
    return {"accuracy": fmean(means), "interval": list(mean_interval(means, num_answers)), "problems": len(means)}
