"""A language model and how it is trained.

checkpoint.py and engine.py have what a stage begins with: a `Checkpoint` (a model with its tokenizer and prompt), and
the `Policy` that is trained from it, of which logprobs.py computes the log-probabilities of sequences that packing.py
has packed. attention.py and compatibility.py are behind them.
"""
