"""TRL's GRPOTrainer as a worker of grpo_step.py; runs in TRL's own environment (trl-requirements.txt).

The trainer is built as its documentation shows and runs its own loop: a callback at the end of each optimizer step
answers the request and waits for the next one. The one intervention is in sampling: a logits processor makes every
completion end at the length that the case gives it.

Shape suffixes:
    B  completions of a step, group after group    S  tokens so far    V  vocabulary
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from worker import Channel, Step, peak_bytes, read_case, synchronize

Case = dict[str, Any]


class EndAt(LogitsProcessor):  # type: ignore[misc]
    """Forbids the end token before a row's length and forces it there; all other tokens are sampled freely."""

    def __init__(self, lengths_B: Tensor, *, prompt_tokens: int, end_id: int) -> None:
        self._lengths_B = lengths_B
        self._prompt_tokens = prompt_tokens
        self._end_id = end_id

    def __call__(self, input_ids_BS: Tensor, scores_BV: Tensor) -> Tensor:
        """Change the logits in place: a copy of them for every token would be charged to TRL."""
        ends_B = self._lengths_B == input_ids_BS.shape[1] - self._prompt_tokens + 1
        scores_BV[:, self._end_id] = -torch.inf
        scores_BV[ends_B] = -torch.inf
        scores_BV[ends_B, self._end_id] = 0.0
        return scores_BV


class TakeTurns(TrainerCallback):  # type: ignore[misc]
    """Times each step of the trainer's loop, from the request for it to the end of its optimizer step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._started = 0.0
        self.sampling_s = 0.0
        self.lengths: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say that the trainer is built, and wait for the first request."""
        self._channel.ready()
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answer the request, and wait for the next: the trainer goes on when it comes."""
        synchronize()
        seconds = time.perf_counter() - self._started
        self._channel.done(Step(seconds, self.sampling_s, self.lengths, peak_bytes()))
        self._wait(control)

    def _wait(self, control: Any) -> None:
        control.should_training_stop = not self._channel.wanted()
        self._started = time.perf_counter()


def settings(case: Case, output_dir: Path) -> GRPOConfig:
    """Return TRL's defaults, but for the case itself, for speed, and for logs and checkpoints, of which there are none.

    Gradient checkpointing, TRL's default, would cost it another forward pass; it is off.
    """
    per_forward = case["trl_batch_size"]
    size = len(case["lengths_B"])
    return GRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=per_forward,
        gradient_accumulation_steps=size // per_forward,
        num_generations=case["group_size"],
        max_completion_length=max(case["lengths_B"]),
        max_steps=len(case["prompts"]),
        beta=case["kl_coefficient"],
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": case["dtype"]},
        bf16=case["dtype"] == "bfloat16",
        use_cpu=case["device"] == "cpu",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def build(case: Case, turns: TakeTurns, output_dir: Path) -> GRPOTrainer:
    """Return a trainer whose completions have the case's lengths and whose rewards are the case's."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        turns.lengths = sorted(len(ids) for ids in completion_ids)
        rewards_B: list[float] = case["rewards_B"]
        return rewards_B

    trainer = GRPOTrainer(
        model=case["model"],
        reward_funcs=reward,
        args=settings(case, output_dir),
        train_dataset=Dataset.from_dict({"prompt": [prompt for prompts in case["prompts"] for prompt in prompts]}),
        # AutoTokenizer puts Qwen2's own splitting rules in place of those that were saved.
        processing_class=PreTrainedTokenizerFast.from_pretrained(case["model"]),
        callbacks=[turns],
    )
    lengths_B = torch.tensor(case["lengths_B"], device=trainer.model.device)
    ends = EndAt(lengths_B, prompt_tokens=case["prompt_tokens"], end_id=case["end_id"])
    generate = partial(trainer.model.generate, logits_processor=LogitsProcessorList([ends]))

    def timed_generate(**inputs: Any) -> Tensor:
        started = time.perf_counter()
        output: Tensor = generate(**inputs)
        synchronize()
        turns.sampling_s = time.perf_counter() - started
        return output

    trainer.model.generate = timed_generate
    return trainer


if __name__ == "__main__":
    channel = Channel()
    case = read_case()
    build(case, TakeTurns(channel), Path(case["model"]).parent / "trl").train()
