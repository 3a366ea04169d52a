"""TRL trains the reference of a run, with the run's problems and settings; runs in TRL's environment.

    PYTHONPATH=. benchmarks/.trl-venv/bin/python benchmarks/trl_learning.py RUN OUT --steps 20

RUN is a folder of `make run PRESET=smollm2`. OUT gets the model after each `--save-every` steps, for
`grpo-pipeline evaluate`, and `steps.jsonl` with the reward of each step and the processor time so far. Rewards are
this project's verdicts. TRL's other settings are its defaults, and those that grpo_step.py found fastest.
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from components.grading.verifier import Verdict, grade
from components.shared.answer_policy import AnswerPolicy


class Record(TrainerCallback):  # type: ignore[misc]
    """Writes a line for each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rewards: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the step."""
        mean = sum(self.rewards) / len(self.rewards)
        step = {"step": state.global_step, "reward": mean, "processor_s": time.process_time()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")
        print(step, flush=True)
        self.rewards.clear()


def settings(config: dict[str, Any], options: argparse.Namespace) -> GRPOConfig:
    """Return TRL's settings for the section `train_grpo` of a run."""
    size = config["prompts_per_step"] * config["group_size"]
    return GRPOConfig(
        output_dir=str(options.out),
        seed=config["seed"],
        max_steps=options.steps,
        per_device_train_batch_size=options.per_forward,
        gradient_accumulation_steps=size // options.per_forward,
        num_generations=config["group_size"],
        max_completion_length=config["sampling"]["max_new_tokens"],
        temperature=config["sampling"]["temperature"],
        loss_type="grpo",
        beta=config["loss"]["kl"]["coefficient"],
        epsilon=config["loss"]["clip"]["low"],
        learning_rate=config["learning_rate"],
        warmup_steps=config["warmup_steps"],
        # The learning rate falls over the run's own steps, of which TRL takes the first in the same time.
        lr_scheduler_type="constant_with_warmup",
        adam_beta1=config["engine"]["betas"][0],
        adam_beta2=config["engine"]["betas"][1],
        weight_decay=config["engine"]["weight_decay"],
        max_grad_norm=config["engine"]["max_gradient_norm"],
        model_init_kwargs={"dtype": "float32"},
        bf16=config["engine"]["precision"] == "bf16",
        use_cpu=True,
        gradient_checkpointing=False,
        save_steps=options.save_every,
        save_only_model=True,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--per-forward", type=int, default=16, help="completions per forward pass")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    params = yaml.safe_load((options.run / "params.yaml").read_text(encoding="utf-8"))
    config, model = params["train_grpo"], params["train_sft"]["model"]
    policy = AnswerPolicy(model["answer"])
    lines = (options.run / "artifacts/prepare_data/problems/train.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = {name for name, weight in config["prompts"]["source_weights"].items() if weight}
    problems = [each for each in map(json.loads, lines) if each["source"] in wanted]
    random.Random(config["seed"]).shuffle(problems)
    options.out.mkdir(parents=True, exist_ok=True)
    record = Record(options.out / "steps.jsonl")

    def accuracy(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        grades = [grade(gold, text, policy) for gold, text in zip(answer, texts, strict=True)]
        rewards = [float(each.verdict is Verdict.RIGHT) for each in grades]
        record.rewards.extend(rewards)
        return rewards

    def messages(question: str) -> list[dict[str, str]]:
        system = {"role": "system", "content": model["chat"]["system"]}
        return [system, {"role": "user", "content": model["prompt"].format(question=question)}]

    trainer = GRPOTrainer(
        model=str(options.run / "artifacts/train_sft/reference"),
        reward_funcs=accuracy,
        args=settings(config, options),
        train_dataset=Dataset.from_list([{"prompt": messages(p["question"]), "answer": p["answer"]} for p in problems]),
        callbacks=[record],
    )
    trainer.train()


if __name__ == "__main__":
    main()
