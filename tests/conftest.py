"""Settings of every test: nothing reaches out to a hub or phones home, and files of tests may run side by side."""

import os
from pathlib import Path
from typing import Any

import pytest

# Read when the libraries are imported, so it has to be here, before any test is.
os.environ.update(HF_HUB_OFFLINE="1", DVC_NO_ANALYTICS="1", GX_ANALYTICS_ENABLED="false")

_SHARING = {"test_dvc": "runs", "test_end_to_end": "runs"}
"""Files whose tests look at the same runs, which would otherwise be made once per process."""
_LONGEST = ("tests/images/test_light_image", "runs", "tests/train_grpo/test_train", "tests/rollout/test_vllm")
"""What is begun with, where several processes share the tests: last it would leave the others with nothing to do."""


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process: what a module prepares is prepared once."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class ByGroup(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest groups, where there are several processes."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: _group(item.nodeid) not in _LONGEST)


def _group(nodeid: str) -> str:
    path = Path(nodeid.partition("::")[0]).with_suffix("")
    return _SHARING.get(path.name, path.as_posix())
