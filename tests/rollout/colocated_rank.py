"""One of the ranks of a training run that samples with vLLM beside it: what a run does, for a test to kill it.

`torchrun -m tests.rollout.colocated_rank FOLDER`: the folder has the checkpoints `old` and `new`.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

from components.policy import checkpoint as checkpoints
from components.policy.lora import merged_state_dict
from components.rollout.vllm.config import VllmConfig
from components.rollout.vllm.engine import VllmEngine
from components.shared.errors import RetryableError
from tests.rollout.vllm_policies import QUESTIONS, largest_difference, sampler, trainer_logprobs

CONFIG = VllmConfig(
    max_tokens=512,
    cache_gib=0.25,
    compile=False,
    start_deadline_s=300,
    request_deadline_s=120,
    weights_by="gloo",
)
STEPS = ("start", "load", "send")
"""The policies are those of the folders `old`, `new` and `old` again."""


def main(folder: Path) -> None:
    """Sample from one policy, from another, and from the first again; write what was found, and wait for the end."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    policies = [checkpoints.load(folder / name, dtype=torch.float32) for name in ("old", "new")]
    engine = VllmEngine(folder / "old", CONFIG, dtype="float32", log=folder / f"vllm-{rank}.log")
    found: dict[str, object] = {}
    for version, step in enumerate(STEPS):
        number = version % 2
        if step == "load":
            engine.load_weights(folder / "new", version)
        if step == "send":
            engine.receive_weights(merged_state_dict(policies[0].model), version)
        groups = sampler(engine, policies[0]).generate(
            QUESTIONS, num_samples=4, temperature=0.7, max_new_tokens=40, seed=rank
        )
        again = sampler(engine, policies[0]).generate(
            QUESTIONS, num_samples=4, temperature=0.7, max_new_tokens=40, seed=rank
        )
        completions = [completion for group in groups for completion in group]
        sequences = [completion.tokens for completion in completions]
        exact = trainer_logprobs(policies[number], sequences, 0.7)
        found[step] = {
            "drawn": largest_difference([list(completion.logprobs) for completion in completions], exact),
            "other": largest_difference(exact, trainer_logprobs(policies[1 - number], sequences, 0.7)),
            "repeats": groups == again,
            "ends": all(
                each.finished == (each.tokens.completion_ids[-1] in policies[0].end_ids) for each in completions
            ),
            "scored": [
                largest_difference(scores, trainer_logprobs(policies[number], sequences, temperature))
                for temperature in (1.0, 0.7)
                for scores in engine.score(sequences, temperature).values()
            ],
        }
    gathered: list[object] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, [completion.tokens.completion_ids for completion in completions])
    found["differ"] = gathered[0] != gathered[-1]
    (engine_process,) = multiprocessing.active_children()
    assert engine_process.pid is not None
    found["apart"] = os.getpgid(engine_process.pid) != os.getpgid(0)
    (folder / f"found-{rank}.json").write_text(json.dumps({**found, "rank": os.getpid(), "engine": engine_process.pid}))
    while not (folder / "lose").exists():
        time.sleep(0.05)
    engine_process.kill()
    try:
        sampler(engine, policies[0]).generate(QUESTIONS, num_samples=1, temperature=1.0, max_new_tokens=1, seed=0)
    except RetryableError as error:
        (folder / f"lost-{rank}.txt").write_text(str(error))
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
