"""Run with `python -m components.prepare_data --params params.yaml --problems outputs/problems`."""

from components.prepare_data.prepare import STAGE
from components.shared.stage import main

if __name__ == "__main__":
    main(STAGE)
