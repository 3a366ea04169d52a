"""Makes `dvc plots show` work without a network: `make setup` runs `python -m pipelines.dvc_plots FILE`.

DVC's own page loads Vega from a content delivery network. This module writes a template of 0.9 MB that contains Vega,
and sets it in .dvc/config.local, which git ignores.
"""

import os
import sys
from pathlib import Path

_VEGA_LITE = "5.21"  # the major version of the charts that DVC writes
_TEMPLATE = """<!DOCTYPE html>
<html>
<head>{{refresh_tag}}<meta charset="utf-8"><title>DVC plots</title><script>{vega}</script></head>
<body>{{plot_divs}}</body>
</html>
"""


def install_template(project: Path, template: Path) -> None:
    """Write the page's template, and set its path in the DVC settings of a project on this machine."""
    import vl_convert
    from dvc.config import Config

    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=_VEGA_LITE)
    # A browser ends a script at the first closing tag, even within a string.
    template.write_text(_TEMPLATE.format(vega=vega.replace("</script", "<\\/script")), encoding="utf-8")
    settings = project / ".dvc"
    with Config(str(settings.absolute())).edit("local") as local:
        local["plots"]["html_template"] = os.path.relpath(template, settings)


if __name__ == "__main__":
    install_template(Path(), Path(sys.argv[1]))
