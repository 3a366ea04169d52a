"""Settings of every test: nothing reaches out to a hub or phones home, and files of tests may run side by side.

Long tests say how many minutes they take, `@pytest.mark.long(minutes=3)`. `--part N` runs one part of them: as many
parts as it takes for each to fit in `PART_MINUTES`, counted from 1 and beginning again after the last, so that the day
of the month will do for N.
"""

import gc
import itertools
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")
# Read when the libraries are imported, so it has to be here, before any test is.
os.environ.update(HF_HUB_OFFLINE="1", DVC_NO_ANALYTICS="1", GX_ANALYTICS_ENABLED="false")

PART_MINUTES = 9
"""Most minutes of a part of the long tests, on two idle cores."""
_MAX_PARTS = 28
"""The days of the shortest month: what is in a later part would hardly ever be run."""
_MINUTES = 1
"""Of a long test that does not say."""
_SHARING = {"test_end_to_end": "runs", "test_runners": "runs"}
"""Files whose tests look at the same runs, which would otherwise be made once per process."""
_LONGEST = ("runs", "tests/train_grpo/test_train", "tests/rollout/test_vllm")
"""What is begun with, where several processes share the tests: last it would leave the others with nothing to do."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--part`."""
    parser.addoption("--part", type=int, metavar="N", help="run the Nth part of the long tests only")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one process: what a module prepares is prepared once."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class ByGroup(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByGroup(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the long tests, if asked to; begin with the longest groups, where processes share the tests."""
    number = config.getoption("part")
    if number is not None:
        chosen = parts({item.nodeid: minutes for item in items if (minutes := _minutes(item))})
        if len(chosen) > _MAX_PARTS:
            raise pytest.UsageError(f"the long tests have {len(chosen)} parts; a month has {_MAX_PARTS} days at least")
        keep = set(chosen[(number - 1) % len(chosen)])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in keep])
        items[:] = [item for item in items if item.nodeid in keep]
    if os.environ.get("PYTEST_XDIST_WORKER"):
        items.sort(key=lambda item: _group(item.nodeid) not in _LONGEST)


def pytest_collection_finish() -> None:
    """Have garbage collection pass over what was imported: it would take as long as many tests."""
    gc.freeze()


def parts(minutes: dict[str, float]) -> list[list[str]]:
    """Pack tests into parts of at most `PART_MINUTES`, in their order.

    Tests of a file stay together, since they may share what takes long to make, unless the file alone is too long.
    """
    packed: list[list[str]] = [[]]
    total = 0.0
    for _, tests in itertools.groupby(minutes, key=lambda name: name.partition("::")[0]):
        names = list(tests)
        fits = sum(map(minutes.__getitem__, names)) <= PART_MINUTES
        for unit in [names] if fits else [[name] for name in names]:
            length = sum(map(minutes.__getitem__, unit))
            if total + length > PART_MINUTES:
                packed.append([])
                total = 0.0
            packed[-1] += unit
            total += length
    return packed


def _minutes(item: pytest.Item) -> float:
    """How long a long test takes; 0 for any other."""
    mark = item.get_closest_marker("long")
    return 0 if mark is None else mark.kwargs.get("minutes", _MINUTES)


def _group(nodeid: str) -> str:
    path = Path(nodeid.partition("::")[0]).with_suffix("")
    return _SHARING.get(path.name, path.as_posix())
