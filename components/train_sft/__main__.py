"""Fine-tune the base model: `python -m components.train_sft --problems DIR --base-model DIR --reference DIR ...`."""

from components.shared.step import main
from components.train_sft.train import train

if __name__ == "__main__":
    main(train, "train_sft")
