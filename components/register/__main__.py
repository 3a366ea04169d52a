"""Run the register stage: `python -m components.register --params params.yaml --policy FOLDER --report FOLDER ...`."""

from components.register.register import register
from components.shared.step import main

if __name__ == "__main__":
    main(register, "register")
