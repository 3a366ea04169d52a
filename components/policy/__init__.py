"""A language model and its training.

A stage loads a `Checkpoint` (checkpoint.py: a model with its tokenizer and prompt) and trains it as a `Policy`
(engine.py). packing.py packs sequences, and logprobs.py computes their log-probabilities, by attention.py or, for other
models, by padded.py: compatibility.py decides which.
"""
