"""Optimise the policy: `python -m components.train_grpo --problems DIR --reference DIR --policy DIR ...`."""

from components.shared.step import main
from components.train_grpo.train import train

if __name__ == "__main__":
    main(train, "train_grpo")
