"""GRPO in one file: the algorithm of this project without the project, in torch and transformers.

    python docs/grpo_in_one_file.py MODEL PROBLEMS.jsonl [--held-out FILE] [--steps N]

MODEL is a folder with a causal language model and its tokenizer; each line of PROBLEMS.jsonl has a `question` and the
`answer`, a number. After `make run` there are both:

    run=outputs/latest/artifacts
    .venv/bin/python docs/grpo_in_one_file.py $run/train_sft/reference $run/prepare_data/problems/train.jsonl \
        --held-out $run/prepare_data/problems/test.jsonl

Each step (DeepSeekMath, arXiv 2402.03300, algorithm 1): sample a group of completions for each of some problems, reward
the right ones, take each reward's z-score in its group as the advantage of all tokens, and take an optimizer step on

    J = mean over completions of the mean over tokens of  min(r A, clip(r, 1 - low, 1 + high) A) - beta k3  (equation 3)

where r is the ratio of the policy to the policy that sampled, and k3 = q/p - log(q/p) - 1 estimates the divergence of
the policy p from the reference q. The project computes the same, in packed batches over many GPUs; a test holds its
engine against `update` below, in float64.

Shape suffixes: P problems, G completions of each, B = P x G completions, T tokens of a completion, V vocabulary.
"""

import argparse
import copy
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Config:
    """Settings, with the values of params.yaml."""

    problems_per_step: int = 16
    group_size: int = 8
    max_new_tokens: int = 48
    learning_rate: float = 3e-4
    warmup_steps: int = 2
    final_learning_rate_fraction: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.04
    scale_by_std: bool = True
    """False leaves advantages in the unit of the reward (Dr. GRPO, arXiv 2503.20783)."""
    mean_over: Literal["completions", "tokens", "constant"] = "completions"
    """What the tokens are averaged over: completions, then their tokens; all tokens alike (DAPO, arXiv 2503.14476); or
    completions times the length limit (Dr. GRPO)."""
    updates_per_step: int = 1
    """Optimizer steps on one rollout; with more than one the ratio leaves 1."""
    max_gradient_norm: float = 1.0


@dataclass(frozen=True)
class Completion:
    """What the policy wrote for a prompt, up to its end token or the limit."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    is_finished: bool


@torch.no_grad()
def sample(model: Any, tokenizer: Any, questions: Sequence[str], config: Config, *, greedy: bool) -> list[Completion]:
    """Return the completions of each question, one after the other: a group, or a single greedy one."""
    size = 1 if greedy else config.group_size
    prompts_B = [
        tokenizer(f"{question}\n", add_special_tokens=False)["input_ids"] for question in questions for _ in range(size)
    ]
    longest = max(map(len, prompts_B))
    padding_B = [longest - len(prompt) for prompt in prompts_B]  # on the left: completions begin where prompts end
    pairs = list(zip(padding_B, prompts_B, strict=True))
    written_BS = model.generate(
        torch.tensor([[tokenizer.eos_token_id] * padding + prompt for padding, prompt in pairs]),
        attention_mask=torch.tensor([[0] * padding + [1] * len(prompt) for padding, prompt in pairs]),
        do_sample=not greedy,
        temperature=None if greedy else 1.0,
        top_k=None if greedy else 0,  # transformers' default of 50 would sample from another policy
        max_new_tokens=config.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
    )
    completions = []
    for prompt, ids in zip(prompts_B, written_BS[:, longest:].tolist(), strict=True):
        is_finished = tokenizer.eos_token_id in ids
        length = ids.index(tokenizer.eos_token_id) + 1 if is_finished else len(ids)
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        completions.append(Completion(prompt, ids[:length], text, is_finished))
    return completions


def reward(completion: Completion, answer: str) -> float:
    """Return 1 if the number behind the last #### is the answer; an unfinished completion has none."""
    stated = re.findall(r"####\s*(-?[\d,]*\.?\d+)", completion.text)
    return float(completion.is_finished and bool(stated) and stated[-1].replace(",", "") == answer.replace(",", ""))


def advantages(rewards_PG: Tensor, config: Config) -> Tensor:
    """Return how much better each reward is than the mean of its group, in standard deviations (section 4.1.2)."""
    centered_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if not config.scale_by_std:
        return centered_PG
    std_P1 = rewards_PG.std(1, correction=0, keepdim=True)
    return centered_PG / torch.where(std_P1 > 0, std_P1, 1.0)  # all equal: zero, and nothing to learn


def logprobs(model: Any, completions: Sequence[Completion]) -> list[Tensor]:
    """Return the log-probability of each token of some completions, (T,) each."""
    longest = max(len(each.prompt_ids) + len(each.ids) for each in completions)
    rows = [each.prompt_ids + each.ids for each in completions]
    ids_BS = torch.tensor([row + [0] * (longest - len(row)) for row in rows])  # nothing attends to what comes after it
    logprobs_BSV = model(ids_BS, use_cache=False).logits[:, :-1].log_softmax(-1)
    logprobs_BS = logprobs_BSV.gather(2, ids_BS[:, 1:, None]).squeeze(2)
    starts = [len(each.prompt_ids) - 1 for each in completions]
    return [logprobs_BS[b, start : start + len(completions[b].ids)] for b, start in enumerate(starts)]


def token_weight(completion: Completion, completions_B: Sequence[Completion], config: Config) -> float:
    """Return what each token of a completion counts in the loss."""
    if config.mean_over == "completions":
        return 1 / (len(completions_B) * len(completion.ids))
    if config.mean_over == "tokens":
        return 1 / sum(len(each.ids) for each in completions_B)
    return 1 / (len(completions_B) * config.max_new_tokens)


def update(
    model: Any,
    reference: Any,
    optimizer: torch.optim.Optimizer,
    completions_B: Sequence[Completion],
    advantages_B: Tensor,
    config: Config,
) -> float:
    """Take `updates_per_step` optimizer steps on a rollout that `model` has sampled; return the last loss."""
    groups = range(0, len(completions_B), config.group_size)
    with torch.no_grad():
        parts = [completions_B[start : start + config.group_size] for start in groups]
        old_BT = [each for part in parts for each in logprobs(model, part)]
        reference_BT = [each for part in parts for each in logprobs(reference, part)] if config.kl_coefficient else []
    for _ in range(config.updates_per_step):
        loss = 0.0
        for start, part in zip(groups, parts, strict=True):
            part_loss = torch.zeros(())
            for b, logprobs_T in enumerate(logprobs(model, part), start):
                ratio_T = (logprobs_T - old_BT[b]).exp()
                clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
                objective_T = torch.minimum(ratio_T * advantages_B[b], clipped_T * advantages_B[b])
                if config.kl_coefficient:
                    log_ratio_T = reference_BT[b] - logprobs_T
                    objective_T = objective_T - config.kl_coefficient * (log_ratio_T.exp() - log_ratio_T - 1)
                weight = token_weight(completions_B[b], completions_B, config)
                part_loss = part_loss - weight * objective_T.sum()
            part_loss.backward()  # gradients of all groups add up
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def learning_rate(step: int, num_steps: int, config: Config) -> float:
    """Return the rate of a step, from 0: a linear rise, then a linear fall to a fraction in the last step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    return config.learning_rate * (1 - (1 - config.final_learning_rate_fraction) * done)


def accuracy(model: Any, tokenizer: Any, problems: Sequence[dict[str, Any]], config: Config) -> float:
    """Return the share of problems that a greedy answer solves."""
    completions = sample(model, tokenizer, [each["question"] for each in problems], config, greedy=True)
    rewards = [reward(each, problem["answer"]) for each, problem in zip(completions, problems, strict=True)]
    return sum(rewards) / len(rewards)


def train(
    model: Any,
    tokenizer: Any,
    problems: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    config: Config,
    num_steps: int,
) -> None:
    """Train a model in place, and print how it fares."""
    reference = copy.deepcopy(model) if config.kl_coefficient else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(0)
    for step in range(num_steps):
        asked_P = draw.sample(problems, config.problems_per_step)
        completions_B = sample(model, tokenizer, [each["question"] for each in asked_P], config, greedy=False)
        answers_B = [each["answer"] for each in asked_P for _ in range(config.group_size)]
        rewards_B = [reward(each, answer) for each, answer in zip(completions_B, answers_B, strict=True)]
        advantages_PG = advantages(torch.tensor(rewards_B).view(-1, config.group_size), config)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, config)
        loss = update(model, reference, optimizer, completions_B, advantages_PG.flatten(), config)
        length = sum(len(each.ids) for each in completions_B) / len(completions_B)
        mean = sum(rewards_B) / len(rewards_B)
        line = f"{step + 1}/{num_steps}  reward {mean:.2f}  length {length:.1f}  loss {loss:.4f}"
        if held_out and (step + 1) % 10 == 0:
            line += f"  held-out accuracy {accuracy(model, tokenizer, held_out, config):.1%}"
        print(line, flush=True)


def read(path: Path | None, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()[:limit]] if path else []


def main() -> None:
    """Train the model that the command line names."""
    parser = argparse.ArgumentParser(description="GRPO in one file")
    parser.add_argument("model", type=Path)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()  # no dropout: it samples what it trains
    held_out = read(options.held_out, 100)
    if held_out:
        print(f"held-out accuracy {accuracy(model, tokenizer, held_out, Config()):.1%}", flush=True)
    train(model, tokenizer, read(options.problems), held_out, Config(), options.steps)


if __name__ == "__main__":
    main()
