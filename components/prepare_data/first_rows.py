"""The first rows of every source, which checks before a run read to find files that cannot be used."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from components.prepare_data.config import PrepareConfig, Source
from components.prepare_data.dataset import Dataset
from components.prepare_data.source import FileSource, MalformedRow
from components.shared.errors import PipelineError
from components.shared.problem import Problem, Split

_NUM_ROWS = 20


def unusable_files(config: PrepareConfig, *, imitated: bool) -> Iterator[str]:
    """Yield a line for each split whose first rows cannot be used and, if solutions are imitated, if there is none."""
    if config.repository:
        return
    has_solutions = []  # of each source with train problems
    for index, source in enumerate(config.sources):
        for split in (Split.TRAIN, Split.TEST):
            rows = _first_rows(source, split)
            if isinstance(rows, str):
                yield f"prepare_data.sources.{index}.{split}: {rows}"
            elif split == Split.TRAIN and rows:
                has_solutions.append(any(isinstance(row, Problem) and row.solution for row in rows))
            elif split == Split.TRAIN and source.max_problems(split) != 0:
                has_solutions.append(True)  # perhaps: the source is not a file on this machine
    if imitated and has_solutions and not any(has_solutions):
        yield (
            "train_sft.num_steps: no train problem has a solution to imitate; set train_sft.num_steps: 0, or name the "
            "column of solutions (prepare_data.sources.0.columns.solution)"
        )


def first_problems(config: PrepareConfig) -> Iterator[Problem]:
    """Yield the first problems of each source; `unusable_files` reports files that cannot be read."""
    for source in config.sources:
        if not isinstance(source, FileSource):
            yield from islice(source.problems(config.seed), _NUM_ROWS)
            continue
        for split in (Split.TRAIN, Split.TEST):
            rows = _first_rows(source, split)
            if not isinstance(rows, str):
                yield from (row for row in rows if isinstance(row, Problem))


def _first_rows(source: Source, split: Split) -> list[Problem | MalformedRow] | str:
    """Return the first rows in the file of a split, or why it cannot be used; empty without such a file here."""
    if not isinstance(source, FileSource) or source.path(split) is None or source.held_out_fraction(split):
        return []
    if isinstance(source, Dataset) and source.is_on_hub(split, Path()):
        return []
    try:
        rows = list(islice((row for row in source.read(split, Path()) if row is not None), _NUM_ROWS))
    except PipelineError as error:
        return str(error)
    if not rows:
        return f"{source.path(split)}: contains no row"
    malformed = [row for row in rows if isinstance(row, MalformedRow)]
    if len(malformed) < len(rows):
        return rows
    file, line, reason = malformed[0]
    return f"{source.path(split)}: none of its first {len(rows)} rows can be used; {file}:{line}: {reason}"


def hub_datasets(config: PrepareConfig) -> dict[str, Callable[[], None]]:
    """Return, by key, a function for each dataset on the hub that raises PipelineError if the dataset is missing."""
    if config.repository:  # it may have a folder with the name of the dataset
        return {}
    return {
        f"prepare_data.sources.{index}.{split}": partial(source.check_on_hub, split, Path())
        for index, source in enumerate(config.sources)
        for split in (Split.TRAIN, Split.TEST)
        if isinstance(source, Dataset) and not source.held_out_fraction(split) and source.is_on_hub(split, Path())
    }
