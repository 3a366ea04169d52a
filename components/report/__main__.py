"""Run the report stage: `python -m components.report --params params.yaml --base-evaluation FOLDER ...`."""

from components.report.report import report
from components.shared.step import main

if __name__ == "__main__":
    main(report, "report")
