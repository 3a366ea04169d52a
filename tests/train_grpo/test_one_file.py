"""docs/grpo_in_one_file.py, against which the trainer's updates are held."""

import copy
import random
import sys
from dataclasses import replace
from importlib import util
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from components.policy.engine import Policy
from components.policy.logprobs import LogprobModel
from components.policy.packing import TokenSequence
from components.train_grpo.reference import Reference
from components.train_grpo.scoring import Group
from components.train_grpo.update import make_experience, split_minibatches, update
from tests import tiny
from tests.policy import plain
from tests.presets import ROOT
from tests.train_grpo.groups import scored
from tests.train_grpo.settings import grpo_config

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the paper's": ({}, {}),
    "DAPO": (
        {"loss__kl": {"coefficient": 0.0}, "loss__clip": {"low": 0.2, "high": 0.28}, "loss__aggregation": "token_mean"},
        {"kl_coefficient": 0.0, "clip_high": 0.28, "mean_over": "tokens"},
    ),
    "Dr. GRPO": (
        {"advantage__estimator": "mean_only", "loss__aggregation": "constant"},
        {"scale_by_std": False, "mean_over": "constant"},
    ),
}


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    """The file as a module."""
    spec = util.spec_from_file_location("grpo_in_one_file", ROOT / "docs/grpo_in_one_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def _rollout(step: int) -> list[Group]:
    """Three groups of four random completions, with random rewards, of which some are equal."""
    draw = random.Random(step)
    groups = []
    for prompt_length in (9, 5, 1):
        prompt = tuple(draw.choices(range(plain.VOCABULARY_SIZE), k=prompt_length))
        members = []
        for _ in range(4):
            ids = tuple(draw.choices(range(plain.VOCABULARY_SIZE), k=draw.randint(1, 9)))
            each = scored({"accuracy": [draw.choice([0.0, 1.0])]}, num_tokens=len(ids))
            members.append(replace(each, completion=replace(each.completion, tokens=TokenSequence(prompt, ids))))
        groups.append(Group(tiny.PROBLEMS[0], members))
    return groups


@pytest.mark.parametrize("name", VARIANTS)
def test_ten_steps_give_the_weights_of_the_file(one_file: ModuleType, name: str) -> None:
    """To a billionth, in float64, with two updates on each rollout, of which the second clips."""
    changes, settings = VARIANTS[name]
    fixed = {"updates_per_rollout": 2, "engine__max_gradient_norm": 0.5, "sampler__max_mismatch": 1e9}
    config = grpo_config(**fixed, **changes)
    start = plain.gpt2()
    model, theirs, reference = (copy.deepcopy(start) for _ in range(3))
    policy = Policy(LogprobModel(model, temperature=1.0), config.engine)
    scorer = Reference(start, "replicated", temperature=1.0)
    own = one_file.Config(updates_per_step=2, group_size=4, max_new_tokens=16, max_gradient_norm=0.5, **settings)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(10):
        groups = _rollout(step)
        experience = make_experience(config, groups, torch.device("cpu"))
        if config.loss.kl.coefficient:
            experience.reference_logprobs_M = plain.logprobs(scorer, experience.sequences_B, 60)
        minibatches = split_minibatches(config, experience, ranks=policy.ranks)
        update(config, policy, minibatches, experience, 0.01)

        every = [each for group in groups for each in group.scored_G]
        sequences = [each.completion.tokens for each in every]
        completions = [one_file.Completion([*each.prompt_ids], [*each.completion_ids], "", True) for each in sequences]
        rewards_PG = torch.tensor([each.rewards["accuracy"][0] for each in every]).double().view(3, 4)
        advantages_B = one_file.advantages(rewards_PG, own).flatten()
        one_file.update(theirs, reference, optimizer, completions, advantages_B, own)
    models = (start, theirs, model)
    before, expected, result = (parameters_to_vector(each.parameters()).detach() for each in models)
    assert float((expected - before).abs().max()) > 0.05
    assert float((result - expected).abs().max()) < 1e-9


def test_a_reward_is_for_the_number_that_is_stated(one_file: ModuleType) -> None:
    """Of a finished completion, behind the last mark."""
    written = {"1+1=2\n#### 2": 1.0, "#### 2\n#### 3": 0.0, "2": 0.0, "#### 1,002": 0.0}
    for text, value in written.items():
        assert one_file.reward(one_file.Completion([], [], text, True), "2") == value
    assert one_file.reward(one_file.Completion([], [], "#### 1,002", True), "1002") == 1.0
    assert one_file.reward(one_file.Completion([], [], "#### 2", False), "2") == 0.0


def test_the_file_samples_from_the_model_that_it_trains(one_file: ModuleType) -> None:
    """First tokens have their frequencies under the model, whatever stands beside their prompt in the batch."""
    checkpoint = tiny.checkpoint()
    torch.nn.init.normal_(checkpoint.model.get_output_embeddings().weight)  # a new model draws all tokens alike
    config = one_file.Config(group_size=3000, max_new_tokens=1)
    torch.manual_seed(0)
    questions = ["Total?", "Tom has 3 apples and gets 2. Total?"]
    completions = one_file.sample(checkpoint.model, checkpoint.tokenizer, questions, config, greedy=False)
    for start in (0, 3000):
        counts = torch.bincount(torch.tensor([each.ids[0] for each in completions[start : start + 3000]]), minlength=2)
        logits_V = checkpoint.model(torch.tensor([completions[start].prompt_ids])).logits[0, -1].detach()
        expected_V = logits_V.softmax(-1)[: len(counts)]
        assert float((counts / 3000 - expected_V).abs().max()) < 0.04
        assert float(expected_V.max()) > 0.1
