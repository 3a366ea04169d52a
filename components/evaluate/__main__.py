"""Examine a model: `python -m components.evaluate --model DIR --problems DIR --evaluation DIR`."""

from components.evaluate.evaluate import evaluate
from components.shared.step import main

if __name__ == "__main__":
    main(evaluate, "evaluate")
