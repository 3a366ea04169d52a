"""Lighter imports of libraries."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Make imports in the block find these packages missing, unless they have been imported before.

    It saves the time and memory of optional packages that a library would import for features that are not used here.
    After the block the packages can be imported. No other thread may import them meanwhile.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # what Python documents for this purpose
    try:
        yield
    finally:
        for name in hidden:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)
