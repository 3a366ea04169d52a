"""Pages for people: one self-contained HTML file each.

They have no scripts, except for links within a page in Kubeflow's frame, which has no address.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_SHARED = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """Return the page of a stage's template with `values`.

    The template extends `page.html.jinja`, fills its blocks `title` and `content`, and uses the classes of page.css.
    Every value is escaped unless it is a `Markup`; a missing one is an error.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, _SHARED]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=percent, count=count, plural=plural)
    stylesheet = Markup((_SHARED / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template.name).render(stylesheet=stylesheet, **values)


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction as a percentage: 0.125 is `12.5 %`; only 0 and 1 become `0 %` and `100 %`."""
    if fraction in {0, 1}:
        return f"{100 * fraction:.0f}\u202f%"
    step = 10**-digits
    rounded = round(100 * fraction, digits)
    if rounded == 0:
        return f"< {step:.{digits}f}\u202f%"
    return f"{min(rounded, 100 - step):.{digits}f}\u202f%"


def count(number: int) -> str:
    """Return a whole number with commas between thousands."""
    return f"{number:,}"


def plural(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 row`, `2 rows`."""
    noun = one if number == 1 else many
    return f"{count(number)} {noun or f'{one}s'}"
