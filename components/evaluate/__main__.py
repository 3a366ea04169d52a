"""Evaluate base, SFT and GRPO model: `python -m components.evaluate --base-model DIR ... --evaluation DIR`."""

from components.evaluate.evaluate import STAGE
from components.shared.stage import main

if __name__ == "__main__":
    main(STAGE)
