"""Sampling with vLLM: sampler.py, and behind it its two engines, the weights on their way, and what runs in vLLM."""
