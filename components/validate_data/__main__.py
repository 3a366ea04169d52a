"""Run with `python -m components.validate_data --params params.yaml --problems PROBLEMS --validation VALIDATION`."""

from components.shared.stage import main
from components.validate_data.validate import STAGE

if __name__ == "__main__":
    main(STAGE)
