"""Sampling with vLLM: sampler.py is the face; the others run and call servers, send weights, and extend vLLM."""
