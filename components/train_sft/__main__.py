"""Fine-tune the base model: `python -m components.train_sft --problems DIR --base-model DIR --reference DIR ...`."""

from components.shared.stage import main
from components.train_sft.train import STAGE

if __name__ == "__main__":
    main(STAGE)
