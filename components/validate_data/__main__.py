"""Run with `python -m components.validate_data --params params.yaml --problems PROBLEMS --validation VALIDATION`."""

from components.shared.step import main
from components.validate_data.validate import validate

if __name__ == "__main__":
    main(validate, "validate_data")
