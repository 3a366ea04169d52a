"""Sampling completions from a policy: the face is sampler.py; transformers_sampler.py and vllm/ are behind it."""
