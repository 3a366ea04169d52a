"""Optimise the policy: `python -m components.train_grpo --problems DIR --reference DIR --policy DIR ...`."""

from components.shared.stage import main
from components.train_grpo.train import STAGE

if __name__ == "__main__":
    main(STAGE)
