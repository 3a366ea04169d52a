"""The page that explains the run form, beside the form."""

import re

from pipelines.parameter_table import page
from tests.pipelines.compiled import FOLDER, FULL, MINIMAL, graph

_PAGE = FOLDER.parent / "docs/parameters.md"


def test_the_page_is_that_of_the_compiled_form() -> None:
    """Names, kinds, defaults and meanings are those that Kubeflow shows: `make compile` after a change."""
    assert _PAGE.read_text() == page(graph(FULL).parameters, graph(MINIMAL).parameters)


def test_every_parameter_has_a_row() -> None:
    """Each parameter is explained once, in the order of the form, with those of the short form marked."""
    rows = re.findall(r"^\| `(\w+)` \|.*?\|.*?\| (yes|) *\|", _PAGE.read_text(), flags=re.MULTILINE)
    names = [name for name, _ in rows if name in graph(FULL).parameters]
    assert names == sorted(graph(FULL).parameters)
    assert {name for name, mark in rows if mark} == set(graph(MINIMAL).parameters)
