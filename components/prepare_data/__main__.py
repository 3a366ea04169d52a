"""Run with `python -m components.prepare_data --params params.yaml --problems outputs/problems`."""

from components.prepare_data.prepare import prepare
from components.shared.step import main

if __name__ == "__main__":
    main(prepare, "prepare_data")
