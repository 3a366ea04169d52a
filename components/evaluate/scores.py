"""The scores of an evaluation: accuracies with confidence intervals, by source, subject and level."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from components.shared.statistics import mean_interval, score

Record = Mapping[str, Any]


def scores(records: Sequence[Record], *, num_samples: int, temperature: float) -> dict[str, Any]:
    """Return the content of scores.json; an unscorable answer counts as not right, and is also counted separately."""
    greedy = [record for record in records if record["sample"] == 0]
    sampled = _grouped((record for record in records if record["sample"] > 0), "source")
    by_source = _grouped(greedy, "source")
    by_source_sampled = {source: _mean_score(rows) for source, rows in sampled.items()}
    return {
        "greedy": {
            "all": _score(greedy),
            "by_source": {source: _score(rows) for source, rows in by_source.items()},
            "by_subject": {source: _scores_by(rows, "subject") for source, rows in by_source.items()},
            "by_level": {source: _scores_by(rows, "level") for source, rows in by_source.items()},
        },
        "sampled": {"num_samples": num_samples, "temperature": temperature, "by_source": by_source_sampled}
        if sampled
        else None,
        "mean_length_tokens": fmean(record["num_tokens"] for record in greedy),
        "worked_fraction": fmean(record["worked"] for record in greedy),
        "truncated_fraction": fmean(not record["finished"] for record in greedy),
        "unscorable": sum(record["verdict"] == "unscorable" for record in greedy),
    }


def _score(records: Sequence[Record]) -> dict[str, Any]:
    return score(sum(record["verdict"] == "right" for record in records), len(records))


def _scores_by(records: Sequence[Record], field: str) -> dict[str, Any]:
    """Scores for each value of `field` that some record has."""
    named = [record for record in records if record[field] not in (None, "")]
    return {name: _score(rows) for name, rows in _grouped(named, field).items()}


def _mean_score(records: Sequence[Record]) -> dict[str, Any]:
    """The probability that one sampled answer is right; samples of the same problem are not independent."""
    means = [fmean(record["verdict"] == "right" for record in rows) for rows in _grouped(records, "id").values()]
    interval = list(mean_interval(means))
    return {"accuracy": fmean(means), "interval": interval, "problems": len(means), "samples": len(records)}


def _grouped(records: Iterable[Record], field: str) -> dict[str, list[Record]]:
    """Records by the text of a field, in the order of the sorted texts."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[str(record[field])].append(record)
    return dict(sorted(groups.items()))
