"""What processes that train are told of those that sample for them."""

SERVERS_VARIABLE = "GRPO_PIPELINE_SAMPLERS"
"""Names the addresses of vLLM servers that run already, with commas between them."""
WEIGHTS_VARIABLE = "GRPO_PIPELINE_WEIGHTS"
"""Names the folder by which weights reach the sampler."""
