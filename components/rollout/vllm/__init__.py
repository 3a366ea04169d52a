"""Sampling with vLLM.

    config.py         its settings: no torch here
    sampler.py        `VllmSampler`: requests and completions, updates of the weights and their verification
    engine.py         vLLM in a process beside the trainer         } the two engines of a sampler
    servers.py        vLLM servers, through client.py              }
    requests.py       what vLLM is asked
    transfer.py       weights from memory to memory; gloo.py adds a backend for machines without GPUs
    verification.py   whether a sampler computes with the weights it was sent

In vLLM's own processes run worker.py, loaded_weights.py and gloo.py.
"""
