"""The files of each split of a dataset, in a folder laid out as on the Hugging Face hub, or on the hub at a commit.

The library `datasets` assigns files to splits, by the front matter of README.md or by file names. For a dataset on the
hub it sees a folder of empty files with the names in the hub's listing. Rows are read from the files themselves,
without the library's conversion and cache. Files of the hub are kept in the hub's own cache, by commit, so they are
never out of date, and can be used without a network.
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from components.prepare_data.rows import ACCEPTED, RawFile, is_data_file, natural_order, stem
from components.shared.errors import PipelineError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_README = "README.md"


def is_hub_id(path: Path) -> bool:
    """Tell whether a path may be the id of a dataset on the hub, such as `openai/gsm8k`; it may also be a folder."""
    return _ID.fullmatch(path.as_posix()) is not None and not is_data_file(path)


def files_in(folder: Path, label: Path, subset: str | None, split: str | None, default: str) -> list[RawFile]:
    """Return the files of a split in a folder, as `HubDataset.names` chooses them; `label` is its path in messages."""
    names = _names(folder, label, subset, split, default)
    return [RawFile(folder / name, label / name, stem(Path(name))) for name in names]


class HubDataset(NamedTuple):
    """A dataset on the hub at one commit."""

    id: str
    commit: str
    listing: tuple[str, ...]
    """Its files; without a network and without a cached listing, the files in the hub's cache."""

    def names(self, subset: str | None, split: str | None, default: str) -> list[str]:
        """Return the names of the files of `split`, or of `default` or the only one; PipelineError if it is missing."""
        with tempfile.TemporaryDirectory(prefix="grpo-pipeline-hub-") as scratch:
            folder = Path(scratch) / self.id
            for name in self.listing:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            if _README in self.listing:
                shutil.copyfile(self._fetch(_README), folder / _README)
            return _names(folder, Path(self.id), subset, split, default)

    def files(self, subset: str | None, split: str | None, default: str) -> list[RawFile]:
        """Return the files of a split, fetched from the hub or taken from its cache; PipelineError as in `names`."""
        names = self.names(subset, split, default)
        files = []
        for name in names:
            prefix = stem(Path(name)) if len(names) > 1 else ""
            files.append(RawFile(self._fetch(name), Path(self.id) / name, prefix))
        return files

    def _fetch(self, name: str) -> Path:
        """Return the path of a file in the hub's cache, fetched if necessary."""
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.id, name, repo_type="dataset", revision=self.commit))
        except Exception as error:  # the hub client raises many kinds of errors, all meaning "not available"
            raise _unavailable(self.id, error) from None


@cache  # looks a branch up once, so that all splits have the same commit
def find_on_hub(name: str, revision: str) -> HubDataset:
    """Return a dataset at the current (offline: cached) commit of a revision; PipelineError if it cannot be fetched."""
    # Slow to import, and not needed for files.
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces each of its retries
    try:
        # This also stores the commit of the revision and the listing in the cache, for a run without a network.
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=_README))
        try:
            listing = [each.path for each in get_cached_repo_tree(name, repo_type="dataset", revision=folder.name)]
        except CachedRepoTreeNotFoundError:
            listing = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        return HubDataset(name, folder.name, tuple(sorted(listing)))
    except Exception as error:  # as in `_fetch`
        raise _unavailable(name, error, revision) from None


def _unavailable(name: str, error: Exception, revision: str = "") -> PipelineError:
    """Return the error for a dataset that cannot be fetched."""
    from huggingface_hub import constants

    at = f" with the revision {revision}" if revision else ""
    remedy = "a gated dataset needs HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        remedy = "HF_HUB_OFFLINE is set, so only files, folders and what is in the hub's cache can be used"
    return PipelineError(
        f"{name}: neither a file or folder here nor a dataset of the hub{at} that can be fetched "
        f"({type(error).__name__}); {remedy}"
    )


def _names(folder: Path, label: Path, subset: str | None, split: str | None, default: str) -> list[str]:
    """Return the names of the files of a split in a folder: see `HubDataset.names`."""
    splits = _splits(folder.resolve(), label, subset)
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else default
    if split not in splits:
        raise PipelineError(f"{label}: has no split `{split}`; set `{default}_split` to one of: {', '.join(splits)}")
    names = [Path(file).relative_to(folder.resolve()).as_posix() for file in splits[split]]
    if not names:
        raise PipelineError(f"{label}: has no file of the split `{split}` here")
    unreadable = [name for name in names if not is_data_file(Path(name))]
    if unreadable:
        raise PipelineError(f"{label}: {Path(unreadable[0]).name} cannot be read; accepted: {ACCEPTED}")
    return sorted(names, key=natural_order)


def _splits(folder: Path, label: Path, subset: str | None) -> Mapping[str, list[str]]:
    """Return the paths of the files of each split of a folder; reads only the names and the README."""
    import datasets  # slow to import, and not needed for single files

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns about a folder without a README
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-datasets-") as cache:
        try:
            builder = datasets.load_dataset_builder(str(folder), subset, cache_dir=cache)
        except datasets.exceptions.DatasetNotFoundError as error:  # raised for a folder without files
            raise PipelineError(f"{label}: has no file that can be read ({error}); accepted: {ACCEPTED}") from None
        except (ValueError, OSError) as error:
            message, _, _ = str(error).partition("Example of usage")
            reason = " ".join(message.split()).replace(str(folder), "")
            if "Config name is missing" in reason or "BuilderConfig" in reason:
                subsets = ", ".join(re.findall(r"'([^']+)'", reason.rpartition("[")[2]))  # the list at its end
                what = f"has no subset `{subset}`" if subset else "has several subsets"
                raise PipelineError(f"{label}: {what}; set `subset` to one of: {subsets}") from None
            raise PipelineError(f"{label}: has no file that can be read ({reason}); accepted: {ACCEPTED}") from None
    return {str(split): list(map(str, paths)) for split, paths in (builder.config.data_files or {}).items()}
