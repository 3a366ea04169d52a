"""Sampling completions from a policy.

What the stages use:
    sampler.py               `Sampler`: generate, update_weights, sleep; `Completion`
    transformers_sampler.py  the sampler in the process of the trainer; behind it group_cache.py
    vllm/sampler.py          the sampler on vLLM, with a copy of the weights; behind it the rest of vllm/
"""
