"""Sampling with vLLM: sampler.py, and behind it its two engines, the transfer of weights, and what runs in vLLM."""
