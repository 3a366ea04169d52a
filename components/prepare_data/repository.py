"""Raw files out of a git and DVC repository, as they are at one commit."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.prepare_data.config import DataRepository, PrepareConfig
from components.shared.errors import PipelineError
from components.shared.progress import say
from components.shared.workspace import Workspace


@contextmanager
def raw_files(config: PrepareConfig) -> Iterator[Path]:
    """Yield the folder that the paths of the sources are relative to; what is fetched into it goes with the block.

    PipelineError where the repository, its commit, a file at that commit or the content behind a pointer is not there.
    """
    if config.repository is None:
        yield Path()
        return
    with tempfile.TemporaryDirectory(prefix="grpo-pipeline-data-") as scratch:
        here = Workspace(Path(scratch), Path(scratch))
        clone, fetched = here.folder / "clone", here.folder / "files"
        here.git("clone", "--quiet", "--no-checkout", "--no-local", config.repository.url, str(clone))
        if here.try_git("-C", str(clone), "cat-file", "-e", f"{config.repository.commit}^{{commit}}") is None:
            raise PipelineError(f"{config.repository.url}: has no commit {config.repository.commit}")
        for path in dict.fromkeys(config.files):
            _fetch(here, clone, path, config.repository, fetched / path)
        say(
            "prepare_data", f"{len(config.files)} files from {config.repository.url} at {config.repository.commit[:12]}"
        )
        yield fetched


def _fetch(here: Workspace, clone: Path, path: Path, repository: DataRepository, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        here.dvc_get(str(clone), path.as_posix(), repository.commit, target)
    except PipelineError as error:
        reason = str(error).removeprefix("dvc: ")
        raise type(error)(f"{path} cannot be had from {repository.url} at {repository.commit}: {reason}") from None
