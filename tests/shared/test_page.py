from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from components.shared.page import count, percent, plural, render


def _page(folder: Path, content: str, **values: object) -> str:
    template = folder / "made.html.jinja"
    template.write_text(
        '{% extends "page.html.jinja" %}{% block title %}T{% endblock %}{% block content %}'
        + content
        + "{% endblock %}"
    )
    return render(template, **values)


def test_a_page_is_one_file_with_nothing_to_fetch(tmp_path: Path) -> None:
    """It can be mailed, opened without a network, and shown where scripts are forbidden; values are escaped."""
    html = _page(tmp_path, "{{ bad }}{{ good }}", bad="<b>1</b>", good=Markup("<i>2</i>"))
    assert html.startswith("<!doctype html>")
    assert "<title>T</title>" in html
    assert "prefers-color-scheme: dark" in html
    assert "&lt;b&gt;1&lt;/b&gt;<i>2</i>" in html
    for forbidden in ("http:", "https:", "<script", "<link", "@import", "url("):
        assert forbidden not in html
    with pytest.raises(UndefinedError, match="nothing_here"):
        _page(tmp_path, "{{ nothing_here }}")


def test_numbers_are_readable() -> None:
    """100 % means all and 0 % means none; thousands are set apart, and nouns agree with their number."""
    texts = [percent(value).replace("\u202f", " ") for value in (0, 0.00001, 0.125, 0.99999, 1)]
    assert texts == ["0 %", "< 0.1 %", "12.5 %", "99.9 %", "100 %"]
    assert count(1234567) == "1,234,567"
    assert [plural(1, "row"), plural(2, "row"), plural(0, "entry", "entries")] == ["1 row", "2 rows", "0 entries"]
