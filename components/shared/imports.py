"""Imports of libraries that import more than is used of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Have what is imported in the block find these packages not installed, unless they have been imported before.

    For libraries that import whatever they find, for parts of theirs that nothing here uses: time and memory of every
    process. These libraries may remember that a package is missing; to all others it is there after the block. No other
    thread may import it meanwhile.
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
