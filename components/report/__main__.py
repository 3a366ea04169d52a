"""Run the report stage: `python -m components.report --params params.yaml --base-evaluation FOLDER ...`."""

from components.report.report import STAGE
from components.shared.stage import main

if __name__ == "__main__":
    main(STAGE)
