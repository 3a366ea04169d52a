"""Pages meant for people: one self-contained HTML file each, without anything to fetch.

They need no scripts, but in Kubeflow's frame, which has no address: there a handler follows links within a page.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_SHARED = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """Return the page that a template beside its stage makes of `values`.

    The template extends `page.html.jinja` and fills its blocks `title` and `content`; the classes it may use are those
    of page.css. Every value is escaped unless it is a `Markup`; a missing one is an error, not an empty place.
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
    """Return a fraction as people read it: 0.125 is `12.5 %`, and an almost whole one is never rounded to whole."""
    if fraction in {0, 1}:
        return f"{100 * fraction:.0f}\u202f%"
    step = 10**-digits
    rounded = round(100 * fraction, digits)
    if rounded == 0:
        return f"< {step:.{digits}f}\u202f%"
    return f"{100 - step if rounded == 100 else rounded:.{digits}f}\u202f%"


def count(number: int) -> str:
    """Return a whole number with a comma between thousands, as everywhere else."""
    return f"{number:,}"


def plural(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: `1 row`, `2 rows`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"
