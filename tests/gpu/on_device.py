"""What `make gpu-check` runs in processes of its own: `python -m tests.gpu.on_device families DEVICE`, or `weights`.

Each function prints what it measured as its last line, and raises if something does not hold.
"""

import copy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from components.policy import checkpoint as checkpoints
from components.policy.checkpoint import Checkpoint
from components.policy.compatibility import require_packed_rows
from components.policy.logprobs import LogprobModel, completion_logprobs
from components.policy.packing import TokenSequence, pack
from components.rollout.sampler import Sampling
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.servers import VllmServers
from tests import tiny
from tests.rollout.vllm_policies import QUESTIONS, VLLM, beside, largest_difference, policy, sampler

_MAX_DIFFERENCE = 0.02
"""Nats between vLLM and the trainer in float32 on a GPU, where kernels may round products to TF32; another policy is
further away by far."""
_NUM_HEADS, _HEAD_SIZE = 14, 64
_GIB = 2**30


def families(device: str) -> None:
    """Try models of several families in both precisions, as each is when it is loaded."""
    layers = 24 if device == "cuda" else 2
    common = {"hidden_size": _NUM_HEADS * _HEAD_SIZE, "num_hidden_layers": layers, "num_attention_heads": _NUM_HEADS}
    common |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 4096}
    window = {**common, "sliding_window": 64}
    gpt2 = GPT2Config(
        n_embd=_NUM_HEADS * _HEAD_SIZE, n_layer=layers, n_head=_NUM_HEADS, vocab_size=4096, eos_token_id=0
    )
    configs = [Qwen2Config(**common), Qwen3Config(**common), LlamaConfig(**common), MistralConfig(**window), gpt2]
    for config in configs:
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            # The probe changes the config of its model.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
            require_packed_rows(model.eval().to(device, dtype))
    print(f"{', '.join(config.model_type for config in configs)}: float32 and bfloat16 with {layers} layers")


def weights(device: str, way: str) -> None:
    """Sample with vLLM before and after its weights are replaced, with a tied output layer, and put it to sleep."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policies = [policy(seed, tied=True) for seed in (1, 2)]
        for made, each in zip(policies, ("old", "new"), strict=True):
            checkpoints.save(made, folder / each)
            if made.device.type != device:
                raise RuntimeError(f"the policy is on {made.device}")
        config = VllmConfig.model_validate({**VLLM, "start_deadline_s": 600, "weights_by": way})
        engine = beside(folder / "old", config, folder)
        try:
            before = _mismatch(engine, policies[0], policies[1])
            engine.set_weights(1, folder / "new" if way == "folder" else policies[1].model.state_dict())
            after = _mismatch(engine, policies[1], policies[0])
            slept = _sleep(engine, policies[1]) if device == "cuda" else "nothing to put to sleep on a CPU"
        except BaseException:
            print((folder / "vllm-0.log").read_text(encoding="utf-8", errors="replace")[-5000:])
            raise
        finally:
            engine.close()
    print(f"vLLM and trainer differ by at most {before:.1e} before and {after:.1e} nats after new weights; {slept}")


def _sleep(engine: VllmServers, made: Checkpoint) -> str:
    """Put vLLM to sleep and wake it; its cache of keys and values has to be free in between."""
    free = [_free_gib()]
    engine.sleep()
    free.append(_free_gib())
    _mismatch(engine, made, None)  # wakes it
    free.append(_free_gib())
    if free[1] - free[0] < 0.9 * VLLM["cache_gib"] or free[1] - free[2] < 0.9 * VLLM["cache_gib"]:
        raise RuntimeError(f"GiB free awake, asleep, awake: {free}")
    return f"asleep it frees {free[1] - free[0]:.2f} GiB and takes {free[1] - free[2]:.2f} GiB back"


def _free_gib() -> float:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / _GIB


def _mismatch(engine: VllmServers, current: Checkpoint, other: Checkpoint | None) -> float:
    """Return how far vLLM's log-probabilities are from those of the policy that it should have."""
    sampling = Sampling(num_samples=4, temperature=1.0, max_new_tokens=25, seed=1)
    groups = sampler(engine, current).generate(tiny.asked(QUESTIONS), sampling)
    completions = [completion for group in groups for completion in group]
    drawn = [list(completion.logprobs) for completion in completions]
    sequences = [completion.tokens for completion in completions]
    difference = largest_difference(drawn, _logprobs(current, sequences))
    if difference > _MAX_DIFFERENCE:
        raise RuntimeError(f"vLLM and the trainer differ by {difference:.3g} nats")
    if other is not None and largest_difference(drawn, _logprobs(other, sequences)) < 10 * _MAX_DIFFERENCE:
        raise RuntimeError("both policies are alike: this shows nothing")
    return difference


@torch.no_grad()
def _logprobs(made: Checkpoint, sequences: Sequence[TokenSequence]) -> list[list[float]]:
    lengths = [len(sequence.completion_ids) for sequence in sequences]
    batches = pack(sequences, max_tokens=2000, device=made.device)
    scores_M = completion_logprobs(LogprobModel(made.model, temperature=1.0), batches, sum(lengths))
    return [part.tolist() for part in scores_M.split(lengths)]


if __name__ == "__main__":
    if sys.argv[1] == "families":
        families(sys.argv[2])
    else:
        weights(sys.argv[2], sys.argv[3])
