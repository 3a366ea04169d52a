"""Run the register stage: `python -m components.register --params params.yaml --policy FOLDER --report FOLDER ...`."""

from components.register.register import STAGE
from components.shared.stage import main

if __name__ == "__main__":
    main(STAGE)
