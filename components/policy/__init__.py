"""A language model and how it is trained.

What the stages use:
    checkpoint.py   load, create, save: a model with its tokenizer and prompt (`Checkpoint`)
    engine.py       `Policy`: forward, backward, step, state; DeepSpeed is behind it
    logprobs.py     `LogprobModel`: log-probabilities and entropies of completion tokens
    packing.py      `TokenSequence`, pack, pack_shard: micro-batches without padding, shards of processes
    parallel.py     `Ranks`: the processes, their barriers and exchanges
    resume.py       `Resumption`: checkpoints of an unfinished run
    shutdown.py     graceful_shutdown
    config.py, training.py, determinism.py, flops.py, lora.py: settings and pieces of a training run

Behind them: attention.py (shared prompts), compatibility.py (which models are supported).
"""
