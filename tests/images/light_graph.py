"""The first two tasks of the graph in containers, in the working folder: `python light_graph.py PARAMS`."""

import sys
from pathlib import Path
from typing import Any

from kfp import dsl, local

from components.preflight.config import load_params, stage_sections
from components.prepare_data.component import prepare_data
from components.validate_data.component import validate_data
from pipelines.run import containers


@dsl.pipeline(name="light")  # type: ignore[untyped-decorator]
def light(prepare_data_config: dict[str, Any], validate_data_config: dict[str, Any]) -> None:
    """Prepare problems and validate them."""
    prepared = prepare_data(config=prepare_data_config)
    validate_data(config=validate_data_config, problems=prepared.outputs["problems"])


if __name__ == "__main__":
    folder = Path.cwd()
    local.init(
        containers.runner(folder, folder / "journal.jsonl"),
        pipeline_root=str(folder / "artifacts"),
        raise_on_error=True,
    )
    params = stage_sections(load_params(Path(sys.argv[1])))
    light(**{f"{stage}_config": params[stage] for stage in ("prepare_data", "validate_data")})
