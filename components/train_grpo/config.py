"""Configuration of Group Relative Policy Optimization: every key, its default and its meaning.

The enums name the variants of each formula; the functions they choose are in objective.py.
"""

import re
from collections import Counter
from enum import StrEnum
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from components.policy.config import CheckpointConfig, EngineConfig
from components.rollout.vllm.config import ServersConfig, VllmConfig
from components.shared.config import Config, Operational
from components.train_grpo.custom_rewards import is_custom
from components.train_grpo.rewards import BUILT_IN


class AdvantageEstimator(StrEnum):
    """What a reward is compared with, and what the difference is divided by."""

    Z_SCORE = "z_score"
    """Group mean and biased standard deviation (divided by G)."""
    Z_SCORE_BESSEL = "z_score_bessel"
    """Group mean and unbiased standard deviation (divided by G - 1): sqrt((G - 1) / G) of `z_score`."""
    MEAN_ONLY = "mean_only"
    """Group mean, divided by nothing (Dr. GRPO)."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Mean of the group's other rewards, divided by nothing (RLOO)."""
    BATCH_STD = "batch_std"
    """Group mean, and the standard deviation of all rewards of the rollout."""


class Supervision(StrEnum):
    """What is rewarded: the completion (section 4.1.2 of the paper) or each of its steps (section 4.1.3)."""

    OUTCOME = "outcome"
    PROCESS = "process"


def reward_column(reward: str) -> str:
    """Return the name of the column of the curves that has the mean of a reward."""
    return "reward_" + re.sub(r"[.:]", "_", reward)


class Combination(StrEnum):
    """Where several rewards become one."""

    BEFORE_NORMALISATION = "before_normalisation"
    """Their weighted sum is normalised."""
    AFTER_NORMALISATION = "after_normalisation"
    """Each is normalised on its own, and the weighted sum once more over the rollout (GDPO)."""


class Aggregation(StrEnum):
    """How the tokens of an optimizer step are averaged."""

    SEQUENCE_MEAN = "sequence_mean"
    """Over the tokens of each completion, then over completions (the paper)."""
    TOKEN_MEAN = "token_mean"
    """Over all tokens of the step (DAPO)."""
    CONSTANT = "constant"
    """Sum over tokens, divided by completions times the length limit (Dr. GRPO)."""


class PolicyLoss(StrEnum):
    """What the ratio to the sampling policy does to a token's term of the loss."""

    CLIPPED = "clipped"
    """The clipped surrogate: beyond the clip a token has no gradient (the paper)."""
    CISPO = "cispo"
    """The clipped ratio is a weight of the token's log-probability: every token has a gradient (MiniMax-M1)."""


class RatioLevel(StrEnum):
    """What the probability ratio to the sampling policy is taken over."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """The geometric mean over a completion, the same for each of its tokens (GSPO)."""


class KLEstimator(StrEnum):
    """Per-token estimators of the KL divergence from the reference."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_CORRECTED = "k3_corrected"
    """k3 times the ratio to the sampling policy, whose expected gradient is that of the divergence itself."""


class KLPlacement(StrEnum):
    """Where the KL term stands."""

    LOSS = "loss"
    REWARD = "reward"


class Truncated(StrEnum):
    """What becomes of a completion that is truncated at the length limit."""

    SCORE = "score"
    """It is scored: an unfinished answer is a wrong one."""
    MASK = "mask"
    """It has no reward, and is not in its group's statistics, in the loss, or in what the loss is divided by."""


class ReferencePlacement(StrEnum):
    """Where the weights of the reference are (reference.py)."""

    REPLICATED = "replicated"
    """All of them in every process, beside the policy."""
    SHARDED = "sharded"
    """Sharded over the processes, and gathered layer by layer when they are used."""
    OFFLOADED = "offloaded"
    """In the memory of the host, and copied to the GPU when they are used."""


class SamplingConfig(Config):
    """How completions are sampled: exactly from the policy's distribution at one temperature."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits, when sampling and when training alike."""
    max_new_tokens: int = Field(1024, gt=0)
    """Tokens after which a completion is truncated."""
    max_batch_size: Annotated[int, Operational] = Field(256, gt=0)
    """Completions generated at once."""
    truncated: Truncated = Truncated.SCORE
    """What becomes of truncated completions."""


class CurriculumConfig(Config):
    """Prompts whose completions disagree are sampled more often: those are the ones to learn from."""

    memory: float = Field(0.5, ge=0, lt=1)
    """Share of a prompt's running pass rate that is kept when it is sampled again."""
    floor: float = Field(0.1, gt=0, le=1)
    """Least weight of a prompt, as a share of that of one solved half the time: none is ever left out for good."""


class PromptsConfig(Config):
    """Which problems are sampled."""

    source_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Share of each data source among the prompts; empty for shares by size."""
    curriculum: CurriculumConfig | None = None
    """Preference by difficulty; null for a fresh shuffle of all problems in every pass."""
    max_resampling_rounds: int = Field(0, ge=0)
    """Times that zero-variance groups are replaced by groups of further prompts (DAPO; 0 keeps them)."""


class RewardModelConfig(Config):
    """A learned reward model, retrained on the rollouts of every iteration (Algorithm 1)."""

    base: str = "reference"
    """Sequence-classification checkpoint with one label: a folder, a hub id, or `reference` for a copy of the
    reference checkpoint with a new head, first trained on rollouts of the reference."""
    initial_rollouts: int = Field(20, ge=0)
    """Rollouts of the reference that it is trained on before the first iteration."""
    learning_rate: float = Field(2e-5, gt=0)
    epochs: int = Field(1, gt=0)
    """Passes over the rollouts of an iteration."""
    replay_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of earlier iterations' completions in what it is trained on (0.1 in the paper)."""

    @model_validator(mode="after")
    def _head_is_trained(self) -> "RewardModelConfig":
        if self.base == "reference" and not self.initial_rollouts:
            raise ValueError("base: reference has a new head, which needs initial_rollouts to learn from")
        return self


class RewardConfig(Config):
    """What a completion is worth."""

    weights: dict[str, float] = Field({"accuracy": 1.0}, min_length=1)
    """Weight of each reward: the name of a built-in one (rewards.py), or `package.module:function` for a custom one."""
    supervision: Supervision = Supervision.OUTCOME
    combination: Combination = Combination.BEFORE_NORMALISATION
    max_unscorable_fraction: Annotated[float, Operational] = Field(0.1, ge=0, le=1)
    """Share of a rollout's completions that may have no verdict or a reward that fails; the run stops above it."""
    max_steps_without_signal: Annotated[int, Operational] = Field(default=30, ge=0)
    """Steps in a row without two different rewards in any group, after which the run stops; 0 never stops it. Steps
    whose every answer is right do not count: there is nothing left to learn."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Tokens before the length limit over which `overlong` falls from 0 to -1; 0 without that reward."""
    repetition_ngram_tokens: int = Field(0, ge=0)
    """Tokens of the n-grams that `repetition` counts; 0 without that reward."""
    model: RewardModelConfig | None = None
    """The model behind `reward_model`; null without that reward."""

    @field_validator("weights")
    @classmethod
    def _rewards_exist(cls, weights: dict[str, float]) -> dict[str, float]:
        for name in weights:
            if name not in BUILT_IN and not is_custom(name):
                raise ValueError(
                    f"there is no reward `{name}`; built in: {', '.join(sorted(BUILT_IN))}; "
                    "for one of your own: package.module:function"
                )
        column, count = Counter(map(reward_column, weights)).most_common(1)[0]
        if count > 1:
            raise ValueError(f"{count} rewards would share the column `{column}` of the curves; rename one of your own")
        return weights

    @model_validator(mode="after")
    def _settings_of_rewards_are_set(self) -> "RewardConfig":
        for name, reward in BUILT_IN.items():
            if reward.key and (name in self.weights) != bool(getattr(self, reward.key)):
                raise ValueError(f"weights.{name} and {reward.key} go together: set both or neither")
        return self

    @model_validator(mode="after")
    def _supervision_fits(self) -> "RewardConfig":
        process = self.supervision is Supervision.PROCESS
        if "steps" in self.weights and not process:
            raise ValueError("weights.steps needs supervision: process")
        if process and not {"steps", "reward_model"} & set(self.weights):
            raise ValueError("supervision: process needs weights.steps or weights.reward_model, which reward steps")
        if process and self.combination is Combination.AFTER_NORMALISATION:
            raise ValueError("combination: after_normalisation needs supervision: outcome")
        return self


class AdvantageConfig(Config):
    """From rewards to advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.Z_SCORE


class ClipConfig(Config):
    """Bounds of the ratio to the sampling policy."""

    low: float = Field(0.2, gt=0, lt=1)
    """The ratio is held above 1 - low (epsilon in the paper)."""
    high: float = Field(0.2, gt=0)
    """The ratio is held below 1 + high; the same as low in the paper, larger in DAPO."""
    dual: float | None = Field(default=None, gt=1)
    """Bound on the ratio where the advantage is negative (dual clip); null for none."""


class KLConfig(Config):
    """The KL penalty that keeps the policy close to the reference."""

    coefficient: float = Field(0.04, ge=0)
    """Weight of the KL term (beta; 0.04 in the paper, 0 for no reference model at all)."""
    estimator: KLEstimator = KLEstimator.K3
    placement: KLPlacement = KLPlacement.LOSS


class LossConfig(Config):
    """The objective."""

    policy_loss: PolicyLoss = PolicyLoss.CLIPPED
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    ratio: RatioLevel = RatioLevel.TOKEN
    clip: ClipConfig = ClipConfig()
    kl: KLConfig = KLConfig()
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the policy's entropy, which is maximised."""

    @model_validator(mode="after")
    def _dual_clip_fits(self) -> "LossConfig":
        if self.clip.dual is not None and self.policy_loss is not PolicyLoss.CLIPPED:
            raise ValueError(f"clip.dual needs policy_loss: clipped; with {self.policy_loss}, set it to null")
        return self


class SamplerConfig(Config):
    """What samples, and how probabilities that are not exactly the trainer's are corrected."""

    vllm: Annotated[VllmConfig | None, Operational] = None
    """vLLM beside the trainer, an engine for each process; null for none."""
    servers: Annotated[ServersConfig | None, Operational] = None
    """vLLM in servers of its own, which all processes share; null for none. Without either, transformers samples from
    the very weights that are trained."""
    overlap: bool = False
    """Whether servers sample the next rollout while the policy learns from the last: what is learned from is then one
    update old."""
    max_importance_weight: float | None = Field(default=None, ge=1)
    """Bound of the per-token weight pi_old / pi_sampler that corrects for the difference; null for no correction."""
    max_mismatch: Annotated[float, Operational] = Field(0.05, gt=0)
    """Mean absolute difference in nats per token between the two above which the run stops."""

    @model_validator(mode="after")
    def _one_engine(self) -> "SamplerConfig":
        if self.vllm and self.servers:
            raise ValueError("vllm and servers exclude one another: set one of them to null")
        if self.vllm and self.vllm.weights_by == "nccl":
            raise ValueError(
                "vllm.weights_by: nccl joins GPUs, and this engine is on the trainer's; accepted: folder, ipc, gloo"
            )
        return self

    @model_validator(mode="after")
    def _overlap_is_corrected(self) -> "SamplerConfig":
        if self.overlap and not self.servers:
            raise ValueError("overlap needs servers, which sample by themselves")
        if self.overlap and self.max_importance_weight is None:
            raise ValueError("overlap needs max_importance_weight: what is sampled is one update old")
        return self


class TrainGRPOConfig(Config):
    """How the reference checkpoint becomes the policy."""

    seed: int = 1
    """Seed of the order of prompts and of sampling."""
    num_iterations: int = Field(1, gt=0)
    """Outer iterations (I in Algorithm 1): each begins by making the policy the reference."""
    num_steps: int = Field(500, gt=0)
    """Rollouts of the whole run (I times M in Algorithm 1)."""
    prompts_per_step: int = Field(128, gt=0)
    """Groups per rollout."""
    group_size: int = Field(8, gt=1)
    """Completions sampled per prompt (G); they are each other's baseline."""
    minibatches_per_rollout: int = Field(1, gt=0)
    """Parts of a rollout, each with an optimizer step of its own."""
    updates_per_rollout: int = Field(1, gt=0)
    """Passes over each rollout (mu in the paper, which uses 1)."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak of the schedule."""
    warmup_steps: int = Field(0, ge=0)
    """Rollouts in which the rate rises to its peak; it then falls linearly."""
    final_learning_rate_fraction: float = Field(1.0, ge=0, le=1)
    """The rate of the last rollout, as a share of the peak."""
    logged_completions_per_step: int = Field(4, ge=0)
    """Completions per rollout that are written to completions.jsonl."""
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    sampler: SamplerConfig = SamplerConfig()
    reference: Annotated[ReferencePlacement, Operational] = ReferencePlacement.REPLICATED
    """Where the weights of the reference are; without a KL term there is no reference."""
    checkpoint: Annotated[CheckpointConfig, Operational] = CheckpointConfig()
    engine: EngineConfig = EngineConfig()

    @model_validator(mode="after")
    def _steps_add_up(self) -> "TrainGRPOConfig":
        if self.warmup_steps >= self.num_steps:
            raise ValueError("warmup_steps must be smaller than num_steps")
        if self.num_steps % self.num_iterations:
            raise ValueError("num_steps must be a multiple of num_iterations")
        if self.prompts_per_step % self.minibatches_per_rollout:
            raise ValueError("prompts_per_step must be a multiple of minibatches_per_rollout")
        if self.prompts_per_step < self.engine.num_processes:
            raise ValueError("prompts_per_step must be engine.num_processes or more: each process samples whole groups")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "TrainGRPOConfig":
        if self.reward.overlong_buffer_tokens >= self.sampling.max_new_tokens:
            raise ValueError("reward.overlong_buffer_tokens must be smaller than sampling.max_new_tokens")
        if self.sampling.max_batch_size < self.group_size:
            raise ValueError("sampling.max_batch_size must hold a group: group_size or more")
        if self.num_iterations > 1 and not self.loss.kl.coefficient and not self.reward.model:
            raise ValueError("num_iterations above 1 needs a KL term or a reward model, which a new iteration renews")
        if self.sampler.overlap and (self.prompts.max_resampling_rounds or self.reward.model):
            raise ValueError("sampler.overlap needs prompts.max_resampling_rounds: 0 and reward.model: null")
        in_reward = self.loss.kl.placement is KLPlacement.REWARD
        if in_reward and self.reward.combination is Combination.AFTER_NORMALISATION:
            raise ValueError("loss.kl.placement: reward needs reward.combination: before_normalisation")
        return self
