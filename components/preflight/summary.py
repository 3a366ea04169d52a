"""The configuration of a run as a page: what the run form shows, and what it became."""

import json
from collections.abc import Mapping

from components.preflight.form import PREFIX, Form
from components.shared.config import Params

_FENCE = "```"


def summary(form: Form, sections: Params, notes: Mapping[str, str]) -> str:
    """Return Markdown with the typed parameters, what was found out beside them, and every section in full."""
    typed = {name: value for name, value in sorted(form.items()) if not name.startswith(PREFIX)}
    rows = [f"| {name} | `{json.dumps(value)}` |" for name, value in typed.items()]
    lines = ["# Configuration of this run", "", "| parameter | value |", "|---|---|", *rows, ""]
    lines += [f"- {name}: {note}" for name, note in notes.items()]
    for name, section in sections.items():
        lines += ["", f"## {name}", "", f"{_FENCE}json", json.dumps(section, indent=2, ensure_ascii=False), _FENCE]
    return "\n".join([*lines, ""])
