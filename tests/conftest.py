"""Settings of every test: nothing reaches out to a hub or phones home, and tests may run side by side."""

import os
from pathlib import Path

import pytest

# Read when the libraries are imported, so it has to be here, before any test is.
os.environ.update(HF_HUB_OFFLINE="1", DVC_NO_ANALYTICS="1", GX_ANALYTICS_ENABLED="false")

_SHARING = {"test_dvc": "runs", "test_end_to_end": "runs"}
"""Files whose tests look at the same runs, which would otherwise be made once per process."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process (`--dist loadgroup`): what a module prepares is prepared once."""
    for item in items:
        name = Path(item.nodeid.partition("::")[0]).with_suffix("")
        item.add_marker(pytest.mark.xdist_group(_SHARING.get(name.name, str(name))))
