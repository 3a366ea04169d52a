"""Which files a split of a dataset has: in a folder laid out as on the Hugging Face hub, or on the hub at a commit.

The library `datasets` decides it, by the front matter of README.md or by the names of files, from a folder that is
here or from the listing of one that is not. Rows are read from the files themselves: no conversion and no cache of the
library is between a file and its problems. Files of the hub are kept in the hub's own cache, by commit, so they are
never out of date, and can be used without a network.
"""

import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from components.prepare_data.rows import ACCEPTED, RawFile, is_data_file, natural_order, stem
from components.shared.errors import PipelineError

_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_README = "README.md"


def is_hub_id(path: Path) -> bool:
    """Tell whether a path may be the id of a dataset on the hub, such as `openai/gsm8k`; a folder may be called so."""
    return _ID.fullmatch(path.as_posix()) is not None and not is_data_file(path)


def files_in(folder: Path, label: Path, subset: str | None, split: str | None, default: str) -> list[RawFile]:
    """Return the files of a split in a folder; `split` is as in `HubDataset.names`."""
    files = _choose(_splits(folder, label, subset), label, split, default)
    names = [Path(file).relative_to(folder.resolve()) for file in files]
    return [RawFile(folder / name, label / name, stem(name)) for name in names]


class HubDataset(NamedTuple):
    """A dataset on the hub at one commit."""

    id: str
    commit: str
    listing: tuple[str, ...]
    """Its files; without a network and without a cached listing, the files in the hub's cache."""

    def names(self, subset: str | None, split: str | None, default: str) -> list[str]:
        """Return the names of the files of a split: of the one called `split`, or else `default`, or else the only one.

        Raises:
            PipelineError: There is no such subset or split, or its files are of no format that can be read.
        """
        return _choose(self._splits(subset), Path(self.id), split, default)

    def files(self, subset: str | None, split: str | None, default: str) -> list[RawFile]:
        """Return the files of a split, fetched from the hub or taken from its cache; PipelineError as in `names`."""
        names = self.names(subset, split, default)
        prefixes = [""] if len(names) == 1 else [stem(Path(name)) for name in names]
        return [
            RawFile(self._fetch(name), Path(self.id) / name, prefix)
            for name, prefix in zip(names, prefixes, strict=True)
        ]

    def _splits(self, subset: str | None) -> dict[str, list[str]]:
        """Return the names of the files of each split, from a folder with empty files of these names and the README."""
        with tempfile.TemporaryDirectory(prefix="grpo-pipeline-hub-") as scratch:
            folder = Path(scratch).resolve() / self.id
            for name in self.listing:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            if _README in self.listing:
                shutil.copyfile(self._fetch(_README), folder / _README)
            splits = _splits(folder, Path(self.id), subset)
            return {
                split: [Path(file).relative_to(folder).as_posix() for file in files] for split, files in splits.items()
            }

    def _fetch(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.id, name, repo_type="dataset", revision=self.commit))
        except Exception as error:  # the hub client raises a wide family of errors, all of them meaning "not available"
            raise _unavailable(self.id, error) from None


def find_on_hub(name: str, revision: str) -> HubDataset:
    """Return a dataset of the hub as a branch, tag or commit is now; without a network, as the cache of the hub has it.

    Raises:
        PipelineError: There is no such dataset or revision, or it cannot be had.
    """
    # Slow to import, and of no use to files.
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it announces each of its retries
    try:
        # This also notes in the cache which commit a branch is at and the listing, for a run without a network.
        folder = Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=_README))
        try:
            listing = [each.path for each in get_cached_repo_tree(name, repo_type="dataset", revision=folder.name)]
        except CachedRepoTreeNotFoundError:
            listing = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        return HubDataset(name, folder.name, tuple(sorted(listing)))
    except Exception as error:  # as above
        raise _unavailable(name, error, revision) from None


def _unavailable(name: str, error: Exception, revision: str = "") -> PipelineError:
    from huggingface_hub import constants

    at = f" with the revision {revision}" if revision else ""
    remedy = "a gated dataset needs HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        remedy = "HF_HUB_OFFLINE is set, so only files, folders and what is in the hub's cache can be used"
    return PipelineError(
        f"{name}: neither a file or folder here nor a dataset of the hub{at} that can be fetched "
        f"({type(error).__name__}); {remedy}"
    )


def _splits(folder: Path, label: Path, subset: str | None) -> dict[str, list[str]]:
    """Return the files of each split of a folder; nothing but names and the README is read."""
    import datasets  # slow to import, and of no use to single files

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a folder without a README is no mistake
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-datasets-") as cache:
        try:
            builder = datasets.load_dataset_builder(str(folder.resolve()), subset, cache_dir=cache)
        except datasets.exceptions.DatasetNotFoundError as error:  # raised for a folder without files
            raise PipelineError(f"{label}: has no file that can be read ({error}); accepted: {ACCEPTED}") from None
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).partition("Example of usage")[0].split()).replace(str(folder.resolve()), "")
            if "Config name is missing" in reason or "BuilderConfig" in reason:
                subsets = ", ".join(re.findall(r"'([^']+)'", reason.rpartition("[")[2]))
                what = f"has no subset `{subset}`" if subset else "has several subsets"
                raise PipelineError(f"{label}: {what}; set `subset` to one of: {subsets}") from None
            raise PipelineError(f"{label}: has no file that can be read ({reason}); accepted: {ACCEPTED}") from None
    files: Mapping[str, list[str]] = builder.config.data_files or {}
    return {str(name): sorted(map(str, paths), key=natural_order) for name, paths in files.items()}


def _choose(splits: Mapping[str, list[str]], label: Path, split: str | None, default: str) -> list[str]:
    wanted = split or (default if default in splits or len(splits) != 1 else next(iter(splits)))
    if wanted not in splits:
        raise PipelineError(f"{label}: has no split `{wanted}`; set `{default}_split` to one of: {', '.join(splits)}")
    if not splits[wanted]:
        raise PipelineError(f"{label}: has no file of the split `{wanted}` here")
    unreadable = [file for file in splits[wanted] if not is_data_file(Path(file))]
    if unreadable:
        raise PipelineError(f"{label}: {Path(unreadable[0]).name} cannot be read; accepted: {ACCEPTED}")
    return splits[wanted]
