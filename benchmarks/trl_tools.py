"""TRL's GRPOTrainer with its tool loop as a worker of tools.py; runs in TRL's own environment.

As in trl_step.py a logits processor ends each turn at its length. What a model of random weights writes is no call, so
the tokenizer's parser of responses is replaced as well: it finds a call in every turn but the last.
"""

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl_step import Case, EndAt, TakeTurns, settings
from worker import Channel, read_case, synchronize

_CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}


class Turns(TakeTurns):
    """Times sampling over all turns of a step."""

    def _wait(self, control: Any) -> None:
        super()._wait(control)
        self.sampling_s = 0.0


class Caller(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Finds a call in each turn of a conversation but the last, whatever it says."""

    num_turns: int

    def parse_response(self, response: list[int], *, prefix: list[int], tools: Any) -> dict[str, Any]:
        """Return a turn as a message; before it there is an end token of the prompt, and two of each earlier turn."""
        del response, tools
        turn = (prefix.count(self.eos_token_id) + 1) // 2
        calls = {"tool_calls": [_CALL]} if turn < self.num_turns else {}
        return {"role": "assistant", "content": "", **calls}


def build(case: Case, turns: Turns, output_dir: Path) -> GRPOTrainer:
    """Return a trainer whose turns have the case's lengths, whose tool answers and whose rewards are the case's."""

    def look() -> str:
        """Answer a call."""
        answer: str = case["observation"]
        return answer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        turns.lengths = sorted(len(ids) for ids in completion_ids)
        rewards_B: list[float] = case["rewards_B"]
        return rewards_B

    tokenizer = Caller.from_pretrained(case["model"])
    tokenizer.num_turns = case["num_turns"]
    tokenizer.response_template = "replaced"  # anything: TRL then asks for no other, and says what a response follows
    prompts = [[{"role": "user", "content": prompt}] for prompts in case["prompts"] for prompt in prompts]
    trainer = GRPOTrainer(
        model=case["model"],
        reward_funcs=reward,
        args=settings(case, output_dir),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        tools=[look],
        callbacks=[turns],
    )
    generate = trainer.model.generate

    def timed_generate(input_ids: Tensor, **inputs: Any) -> Tensor:
        lengths_B = torch.full(input_ids.shape[:1], case["turn_tokens"], device=input_ids.device)
        ends = EndAt(lengths_B, prompt_tokens=input_ids.shape[1], end_id=case["end_id"])
        started = time.perf_counter()
        output: Tensor = generate(input_ids=input_ids, **inputs, logits_processor=LogitsProcessorList([ends]))
        synchronize()
        turns.sampling_s += time.perf_counter() - started
        return output

    trainer.model.generate = timed_generate
    return trainer


if __name__ == "__main__":
    channel = Channel()
    case = read_case()
    build(case, Turns(channel), Path(case["model"]).parent / "trl").train()
