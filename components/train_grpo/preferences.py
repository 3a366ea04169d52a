"""Preference pairs from a file: a prompt, and of two responses to it the one that people or a judge chose.

No torch is imported here: the file is checked before the first stage, wherever that is.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from components.shared import jsonl
from components.shared.errors import PipelineError

KEY = "train_grpo.reward.model.preferences"
_PROMPT_COLUMNS = ("prompt", "question")
_RESPONSE_COLUMNS = ("chosen", "rejected")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BUILDERS = {".json": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""Of the `datasets` library, which would also read numbers where a CSV file has texts such as `42`."""
_ACCEPTED = "accepted: .jsonl, .json, .csv, .tsv, .parquet, .arrow, or a folder that `datasets` has saved"


class Preference(NamedTuple):
    """A row of the file."""

    prompt: str
    chosen: str
    rejected: str


def read_preferences(path: Path) -> list[Preference]:
    """Return all pairs of a file, or of a data set that `datasets` saved in a folder.

    Raises:
        PipelineError: There is no such file, it is of another kind, a row is no pair, or there are fewer than two.
    """
    pairs = [_preference(row, where) for where, row in _rows(path)]
    if len(pairs) < 2:
        raise PipelineError(f"{KEY}: {path}: has {len(pairs)} of the 2 pairs or more that are needed")
    return pairs


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row, after its place in the file for errors."""
    if not path.exists():
        raise PipelineError(f"{KEY}: {path}: no such file or folder")
    if path.suffix == ".jsonl" or path.suffix in _DELIMITERS:
        rows = _separated(path, _DELIMITERS[path.suffix]) if path.suffix in _DELIMITERS else jsonl.read_rows(path)
        try:
            for number, row in rows:
                yield f"{path}:{number}", row
        except PipelineError as error:
            raise PipelineError(f"{KEY}: {error}") from None
    else:
        for number, row in enumerate(_dataset(path), start=1):
            yield f"{path}: row {number}", row


def _separated(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a table of texts after its last line."""
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter)
            for row in reader:
                yield reader.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise PipelineError(f"{path}: cannot be read ({error})") from None


def _dataset(path: Path) -> Any:
    """Return the rows of any other file or folder."""
    if path.is_file() and path.suffix not in _BUILDERS:
        raise PipelineError(f"{KEY}: {path}: is of an unknown kind; {_ACCEPTED}")
    import datasets  # takes a second

    datasets.disable_progress_bars()
    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(str(path))
            return loaded["train"] if isinstance(loaded, datasets.DatasetDict) else loaded
        builder = _BUILDERS[path.suffix]
        return list(datasets.load_dataset(builder, data_files=str(path), split="train", streaming=True))
    except Exception as error:  # the readers behind it raise errors of their own
        reason = str(error).strip().split("\n", 1)[0]
        raise PipelineError(f"{KEY}: {path}: cannot be read ({reason}); {_ACCEPTED}") from None


def _preference(row: dict[str, Any], where: str) -> Preference:
    prompt = next((name for name in _PROMPT_COLUMNS if name in row), None)
    missing = [] if prompt else [" or ".join(_PROMPT_COLUMNS)]
    missing += [name for name in _RESPONSE_COLUMNS if name not in row]
    if missing:
        columns = ", ".join(map(str, row)) or "none"
        raise PipelineError(f"{KEY}: {where}: lacks the column {missing[0]}; it has {columns}")
    names = (str(prompt), *_RESPONSE_COLUMNS)
    for name in names:
        if not isinstance(row[name], str) or not row[name].strip():
            kind = "empty" if isinstance(row[name], str) else f"of type {type(row[name]).__name__}"
            raise PipelineError(f"{KEY}: {where}: {name} is {kind}; text is expected")
    preference = Preference(*(row[name] for name in names))
    if preference.chosen == preference.rejected:
        raise PipelineError(f"{KEY}: {where}: chosen and rejected are the same text")
    return preference
