"""Configuration of Group Relative Policy Optimization: every key, its default and its meaning.

Variants of a formula are the values of a Literal; objective.py has a case for each, and mypy checks that none lacks.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from components.policy.config import CheckpointConfig, EngineConfig, Schedule, TrackingConfig
from components.rollout.vllm.config import MAX_LORA_RANK, SamplerDtype, ServersConfig, VllmConfig
from components.shared.config import Config, Operational, SameAs
from components.shared.custom_code import is_custom
from components.train_grpo.judge import JudgeConfig
from components.train_grpo.rewards import BUILT_IN
from components.train_grpo.slow_rewards import RewardCallsConfig

AdvantageEstimator = Literal["z_score", "z_score_bessel", "mean_only", "leave_one_out", "batch_std", "mean_scaled"]
PolicyLoss = Literal["clipped", "cispo", "sapo", "gmpo", "dppo"]
KLEstimator = Literal["k3", "k3_corrected"]
Aggregation = Literal["sequence_mean", "token_mean", "prompt_mean", "constant"]
ReferencePlacement = Literal["replicated", "sharded", "offloaded", "adapters"]

EXPECTED_CLASSIFIER = "expected the folder or hub id of a sequence classifier, or `reference` to make one"
"""End of errors about `reward.model.base`."""
_REWARDS_BELOW_0 = ("length", "overlong")
"""Built-in rewards with values that can be negative; custom rewards and environments may have such values, too."""


def _require(holds: bool, rule: str) -> None:
    """Raise ValueError with a rule that does not hold."""
    if not holds:
        raise ValueError(rule)


def reward_column(reward: str) -> str:
    """Return the name of a reward's column in the curves, which has its means."""
    return "reward_" + re.sub(r"[.:]", "_", reward)


class SamplingConfig(Config):
    """How completions are sampled: exactly from the policy's distribution at one temperature."""

    temperature: float = Field(1.0, gt=0)
    """Divides the logits, when sampling and when training alike."""
    max_new_tokens: int = Field(1024, gt=0)
    """Tokens after which a completion is truncated."""
    max_batch_size: Annotated[int, Operational] = Field(256, gt=0)
    """Completions generated at once."""
    truncated: Literal["score", "mask"] = "score"
    """Whether a truncated completion is scored as a wrong answer, or masked: left out of its group's statistics, of the
    loss, and of what the loss is divided by."""


class PromptsConfig(Config):
    """Which problems are sampled."""

    source_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Share of each data source among the prompts; empty for shares by size."""
    max_pass_rate: float | None = Field(default=None, gt=0, lt=1)
    """Share of right completions in a group from which its problem is left out of later passes (0.9 in ScaleRL). All
    problems return once fewer are left than a step needs. Null leaves out none."""
    max_resampling_rounds: int = Field(0, ge=0)
    """Times that zero-variance groups are replaced by groups of further prompts (DAPO; 0 keeps them)."""

    @model_validator(mode="after")
    def _some_source_has_weight(self) -> "PromptsConfig":
        weights = self.source_weights
        _require(not weights or any(weights.values()), "one of source_weights must be above 0")
        return self


class RewardModelConfig(Config):
    """A learned reward model: the probability that a completion, or each step of one, is right.

    It is retrained on the rollouts of every iteration and a tenth of earlier ones (Algorithm 1) as `engine` says.
    """

    base: str = "reference"
    """Sequence-classification checkpoint with one label: a folder, a hub id, or `reference` for a copy of the
    reference checkpoint with a new head, first trained on rollouts of the reference."""
    initial_rollouts: int = Field(20, ge=0)
    """Rollouts of the reference that it is trained on before the first iteration."""
    learning_rate: float = Field(2e-5, gt=0, le=1)
    epochs: int = Field(1, gt=0)
    """Passes over the rollouts of an iteration."""

    @model_validator(mode="after")
    def _head_is_trained(self) -> "RewardModelConfig":
        is_trained = self.base != "reference" or self.initial_rollouts > 0
        _require(is_trained, "base: reference has a new head, which needs initial_rollouts to learn from")
        return self


class RewardConfig(Config):
    """The rewards of a completion, and their weights."""

    weights: dict[str, FiniteFloat] = Field({"accuracy": 1.0}, min_length=1)
    """Weight of each reward: the name of a built-in one (rewards.py), or `package.module:function` for a custom one."""
    by_source: dict[str, dict[str, FiniteFloat]] = Field(default_factory=dict)
    """Weights of the rewards for the problems of a source, which replace `weights` for that source."""
    supervision: Literal["outcome", "process", "turn"] = "outcome"
    """What is rewarded: the completion (section 4.1.2 of the paper) or each of its steps (section 4.1.3). The steps of
    `process` are its lines, those of `turn` the turns of the model in an environment. `reward_model`, `environment` and
    custom rewards decorated with `step_reward` have a value for each step; all others count for the last step."""
    max_unscorable_fraction: Annotated[float, Operational] = Field(0.1, ge=0, le=1)
    """Share of a rollout's completions without a verdict, or with a reward or environment that failed, above which the
    run stops. Such a completion has no reward; where its environment failed, it is not in the loss either."""
    max_steps_without_signal: Annotated[int, Operational] = Field(default=30, ge=0)
    """Steps in a row without two different rewards in any group, after which the run stops; 0 never stops it. Steps
    whose every answer is right do not count: there is nothing left to learn."""
    min_mixed_at_start: Annotated[float, Operational] = Field(0.0, ge=0, le=1)
    """Share of the first rollout's groups in which rewards have to differ: a run with fewer ends before its first
    update, and says what to change. `grpo-pipeline preview` tells the share beforehand."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Tokens before the length limit over which `overlong` falls from 0 to -1; 0 without that reward."""
    model: RewardModelConfig | None = None
    """The model behind `reward_model`; null without that reward."""
    judge: JudgeConfig | None = None
    """The server behind the reward `judge`; null without that reward."""
    calls: RewardCallsConfig = RewardCallsConfig()

    @property
    def names(self) -> list[str]:
        """The rewards of all sources."""
        return list(dict.fromkeys(chain(self.weights, *self.by_source.values())))

    def weights_of(self, source: str) -> dict[str, float]:
        """Return the weight of each reward that problems of a source have."""
        return self.by_source.get(source, self.weights)

    @field_validator("by_source")
    @classmethod
    def _sort_weights(cls, by_source: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        """Sort the inner mappings too, for the reason that `Config` gives."""
        return {source: dict(sorted(weights.items())) for source, weights in by_source.items()}

    @model_validator(mode="after")
    def _rewards_fit(self) -> "RewardConfig":
        built_in = ", ".join(sorted(BUILT_IN))
        for source, weights in self.by_source.items():
            _require(bool(weights), f"by_source.{source}: names no reward; leave it out for `weights`")
        for name in self.names:
            is_known = name in BUILT_IN or is_custom(name)
            _require(is_known, f"there is no reward `{name}`; built in: {built_in}; custom: package.module:function")
        column, count = Counter(map(reward_column, self.names)).most_common(1)[0]
        _require(count == 1, f"{count} rewards would share the column `{column}` of the curves; rename a custom one")
        for name, reward in BUILT_IN.items():
            if reward.key:
                has_both_or_neither = (name in self.names) == bool(getattr(self, reward.key))
                _require(has_both_or_neither, f"weights.{name} and {reward.key} go together: set both or neither")
        if self.supervision == "outcome":
            return self
        step_rewards = {"process": {"reward_model"}, "turn": {"reward_model", "environment"}}[self.supervision]
        needed = " or ".join(f"weights.{name}" for name in sorted(step_rewards))
        for weights in (self.weights, *self.by_source.values()):
            has_step_reward = any(name in step_rewards or is_custom(name) for name in weights)
            _require(has_step_reward, f"supervision: {self.supervision} needs {needed}, or a custom reward of steps")
        return self


class TeacherConfig(Config):
    """A frozen model that the policy is drawn to on its own completions, token by token (on-policy distillation)."""

    base: str = Field(min_length=1)
    """Folder of a model that a stage has saved, or any model as in `train_sft.model.base`; its tokenizer has to be that
    of the policy."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the divergence KL(pi || pi_teacher) of each token, in nats, which is added to the policy loss. If all
    rewards have the weight 0, the policy learns from the teacher alone."""
    placement: Annotated[Literal["replicated", "offloaded"], Operational] = "replicated"
    """Where its weights are, as for `reference`; of no effect with `server`."""
    server: str | None = Field(None, pattern=r"^https?://")
    """API of a vLLM server with this model, such as `http://teacher:8000/v1`, whose context has room for a token
    more than the longest prompt and completion; `base`, still a model folder, is then read for its tokenizer alone.
    A server returns log-probabilities of sampled tokens, not whole distributions: the advantage of a token grows by
    coefficient * log(pi_teacher / pi), a policy gradient whose mean is that of the divergence. Needs a
    `sampling.temperature` of 1. Null loads the model here, with the exact divergence."""
    key_variable: str | None = None
    """Environment variable that holds the server's API key, as for `reward.judge`; null sends none."""


class AdvantageConfig(Config):
    """From rewards to advantages."""

    estimator: AdvantageEstimator = "z_score"
    """What a reward is compared with, and what the difference is divided by. `z_score`: the group's mean and biased
    standard deviation; `z_score_bessel`: its mean and unbiased deviation; `mean_only`: its mean and nothing (Dr. GRPO);
    `leave_one_out`: the mean of its other rewards and nothing (RLOO); `batch_std`: its mean and the deviation of all
    rewards of the rollout; `mean_scaled`: its mean and the same mean, for rewards that are never negative
    (MaxRL)."""


class SoftClipConfig(Config):
    """How fast SAPO's gate closes as the ratio leaves 1: the temperatures of its sigmoid."""

    positive: float = Field(1.0, gt=0)
    """Temperature for tokens with a positive advantage."""
    negative: float = Field(1.05, gt=0)
    """Temperature for all other tokens: larger, as their gradients are less stable."""


class ClipConfig(Config):
    """Bounds of the ratio to the sampling policy; with `dppo`, of the difference from its probability."""

    low: float = Field(0.2, gt=0, le=1)
    """The ratio is held above 1 - low (epsilon in the paper); 1 is no lower bound, as CISPO was run in MiniMax-M1."""
    high: float = Field(0.2, gt=0)
    """The ratio is held below 1 + high; the same as low in the paper, larger in DAPO."""


class KLConfig(Config):
    """The KL penalty that keeps the policy close to the reference."""

    coefficient: float = Field(0.04, ge=0)
    """Weight of the KL term (beta; 0.04 in the paper, 0 for no reference model at all)."""
    estimator: KLEstimator = "k3"
    """What estimates the divergence at a token. `k3` is the paper's; `k3_corrected`, TRL's default, has the gradient of
    the divergence."""


class LossConfig(Config):
    """The objective."""

    policy_loss: PolicyLoss = "clipped"
    """`clipped`: the paper's surrogate, in which a token beyond the clip has no gradient; `cispo`: the clipped ratio
    weights the log-probability, and every token has a gradient (MiniMax-M1); `sapo`: a smooth gate in place of
    the clip; `gmpo`: the geometric mean of the clipped ratios of a completion; `dppo`: the ratio, without a gradient
    where the token's probability has changed by more than `clip.low` or `clip.high`."""
    aggregation: Aggregation = "sequence_mean"
    """How the tokens of an optimizer step are averaged. `sequence_mean`: over each completion, then over completions
    (the paper); `token_mean`: over all tokens (DAPO); `prompt_mean`: over all tokens of a prompt's group, then over
    prompts (ScaleRL); `constant`: their sum is divided by completions times the length limit (Dr. GRPO)."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio to the sampling policy: that of each token, or the geometric mean over its completion (GSPO)."""
    clip: ClipConfig = ClipConfig()
    soft_clip: SoftClipConfig = SoftClipConfig()
    kl: KLConfig = KLConfig()

    @model_validator(mode="after")
    def _ratio_fits(self) -> "LossConfig":
        is_of_tokens = self.ratio == "token" or self.policy_loss in ("clipped", "cispo")
        _require(is_of_tokens, f"policy_loss: {self.policy_loss} is made of ratios of tokens; set ratio to token")
        return self


class ImportanceWeightConfig(Config):
    """The weight pi_old / pi_sampler of the policy loss: importance sampling, truncated where it has a bound."""

    level: Literal["token", "sequence"] = "token"
    """Unit with a weight: each token, or its completion, with the product over all its tokens."""
    max: float | None = Field(None, ge=1)
    """Larger weights are lowered to it (TIS, 2.0 for example); null for no bound, which needs `mask`."""


class ImportanceMaskConfig(Config):
    """Bounds of pi_old / pi_sampler outside which nothing is learned from a token or completion."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """What is masked, and by which ratio. `token`: each token by its own ratio; its policy loss is then zero (IcePop).
    `sequence`: each completion by the product over its tokens. `geometric`: each completion by their geometric mean,
    which does not grow with the length. A masked completion is neither in the loss nor in its divisor (MIS); `sequence`
    and `geometric` cost a forward pass."""
    low: float = Field(0.5, ge=0, lt=1)
    """Smallest ratio that is not masked; 0 for no lower bound."""
    high: float = Field(5.0, gt=1)
    """Largest ratio that is not masked."""


class CorrectionConfig(Config):
    """How the loss corrects for a sampler that did not sample from pi_old, the policy before the update.

    pi_sampler is what the sampler recorded: other kernels, another number type, and older weights where there is
    staleness. The ratio of the loss and its clip are of pi / pi_old alone (decoupled PPO).
    """

    weight: ImportanceWeightConfig | None = None
    """Weight of the policy loss; null for none."""
    mask: ImportanceMaskConfig | None = None
    """Samples that nothing is learned from; null for none."""

    @property
    def masks_completions(self) -> bool:
        """Whether whole completions are masked, before the update."""
        return self.mask is not None and self.mask.level != "token"

    @model_validator(mode="after")
    def _weights_are_bounded(self) -> "CorrectionConfig":
        is_bounded = self.weight is None or self.weight.max is not None or self.mask is not None
        _require(is_bounded, "weight needs max, such as 2.0, or mask, which bounds the weights in its place")
        return self


class SamplerConfig(Config):
    """The engine that samples, the maximum age of its weights, and the correction of the loss for both."""

    vllm: Annotated[VllmConfig | None, Operational] = None
    """A vLLM server beside each process of the training, on its GPU; null for none."""
    servers: Annotated[ServersConfig | None, Operational] = None
    """Separate vLLM servers, which all processes share; null for none. Without either, transformers samples from
    the very weights that are trained."""
    dtype: SamplerDtype | None = None
    """Type of vLLM's weights and activations, to which what comes from the trainer is rounded; null for that of
    `engine.precision`."""
    max_staleness: int = Field(0, ge=0)
    """Maximum number of policy updates between sampling and learning. With 0, each rollout is sampled from the weights
    that learn from it. With 1 or more, the sampler gets new weights every so many steps, and samples as many rollouts
    ahead from them; servers sample while the policy learns, other samplers in turn with it."""
    correction: CorrectionConfig = CorrectionConfig()
    max_mismatch: Annotated[float, Operational] = Field(0.05, gt=0)
    """Nats per token; mean absolute difference between the log-probabilities of sampler and trainer above which the run
    stops. With `max_staleness` it has to leave room for as many updates."""

    @property
    def samples_ahead(self) -> bool:
        """Whether servers sample for the next step while the policy learns."""
        return self.servers is not None and self.max_staleness > 0

    @model_validator(mode="after")
    def _parts_fit(self) -> "SamplerConfig":
        vllm = self.vllm
        _require(not (vllm and self.servers), "vllm and servers exclude one another: set one of them to null")
        shares_gpu = "this engine is on the trainer's; accepted: folder, ipc"
        _require(not vllm or vllm.weights_by != "nccl", f"vllm.weights_by: nccl joins GPUs, and {shares_gpu}")
        uses_vllm = vllm is not None or self.servers is not None
        _require(self.dtype is None or uses_vllm, "dtype is that of vLLM, which needs vllm or servers")
        allows_mask = uses_vllm or self.max_staleness > 0 or self.correction.mask is None
        reason = "transformers samples from pi_old itself"
        _require(allows_mask, f"correction.mask needs vllm, servers or max_staleness above 0: {reason}")
        is_corrected = self.max_staleness == 0 or self.correction.weight is not None
        _require(is_corrected, "max_staleness above 0 needs correction.weight: what is sampled is from an older policy")
        return self


class GRPOCheckpointConfig(CheckpointConfig):
    """Checkpoints of an unfinished run, some of them in the registry as well."""

    keep_in_registry: Annotated[int, Operational] = Field(3, ge=0)
    """Number of newest checkpoints of a run in the registry, with `keep_best` also the best in validation: models that
    can be fetched, pushed during training. 0 pushes none, as does an `every_steps` that is not smaller than
    `num_steps`. The checkpoint of step `num_steps` is not pushed: `register` decides on the result."""


class ValidationConfig(Config):
    """Greedy answers to problems of the dev split: before the first step, every few steps, and after the last."""

    every_steps: int = Field(20, gt=0)
    """Steps between validations."""
    num_problems: int = Field(200, gt=0)
    """Problems that are answered, drawn once from the dev split with the seed; all where it has fewer."""
    patience: int | None = Field(None, gt=0)
    """Validations in a row without a new best accuracy after which training stops; null never stops it."""


class LimitsConfig(Config):
    """Limits on the training itself, each on a mean over its last steps; training stops at the first that is exceeded.

    The result is then the best policy in validation so far; the run fails where there is none. Limits of the same names
    in `report.gate.health` are on the result.
    """

    over_steps: int = Field(10, gt=0)
    """Steps over which the metrics are averaged; no limit applies before that many steps."""
    max_kl: float | None = Field(None, gt=0)
    """Nats per token; maximum KL divergence from the reference; null for none."""
    min_entropy: float | None = Field(None, ge=0)
    """Nats per token; minimum entropy of the policy; null for none."""
    max_completion_tokens: float | None = Field(None, gt=0)
    """Maximum mean length of the sampled completions; null for none."""
    max_truncated_fraction: float | None = Field(None, ge=0, le=1)
    """Maximum fraction of the sampled completions that reach the token limit; null for none."""


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
    """Parts of a rollout, with one optimizer step each."""
    updates_per_rollout: int = Field(1, gt=0)
    """Passes over each rollout (mu in the paper, which uses 1)."""
    learning_rate: float = Field(1e-6, gt=0, le=1)
    """Peak of the schedule."""
    warmup_steps: int = Field(0, ge=0)
    """Rollouts in which the rate rises to its peak."""
    schedule: Schedule = "linear"
    """How the rate then falls to `final_learning_rate_fraction` of the peak: in a line, along half a cosine, or not at
    all (`constant`, which does not use that fraction)."""
    final_learning_rate_fraction: float = Field(1.0, ge=0, le=1)
    """The rate of the last rollout, as a share of the peak."""
    logged_completions_per_step: int = Field(4, ge=0)
    """Completions per rollout that are written to completions.jsonl."""
    prompts: PromptsConfig = PromptsConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    teacher: TeacherConfig | None = None
    """Model to distil from; null for none."""
    sampler: SamplerConfig = SamplerConfig()
    reference: Annotated[ReferencePlacement | None, Operational] = None
    """Where the weights of the reference are. `replicated`: whole in every process; `sharded`: over processes, and
    gathered layer by layer in use; `offloaded`: in the memory of the host, and copied to the GPU in use; `adapters`:
    with `engine.lora`, it is the policy with its adapters disabled, and takes no memory. Null chooses `adapters` where
    they can be used, else `replicated`. Without a KL term there is no reference."""
    validation: ValidationConfig | None = None
    """Measurement of the policy on held-out problems while it is trained; null for none."""
    limits: LimitsConfig = LimitsConfig()
    checkpoint: GRPOCheckpointConfig = GRPOCheckpointConfig()
    tracking: Annotated[TrackingConfig, Operational] = TrackingConfig()
    profile_steps: Annotated[list[Annotated[int, Field(gt=0)]], Operational] = Field(default_factory=list)
    """Steps of which torch's profiler writes a trace, with the phases as ranges; it slows them down."""
    registry: Annotated[str, Operational, SameAs("register", "registry")] = Field("registry", min_length=1)
    """Registry of the checkpoints."""
    storage: Annotated[str | None, Operational, SameAs("register", "storage")] = None
    """DVC remote of their weights."""
    storage_endpoint: Annotated[str | None, Operational, SameAs("register", "storage_endpoint")] = None
    """Address of the remote's S3 server, where it is not Amazon's."""
    engine: EngineConfig = EngineConfig()

    @property
    def reference_placement(self) -> ReferencePlacement:
        """Where the weights of the reference are: `reference`, or the default if it is null."""
        can_use_adapters = self.engine.lora is not None and self.num_iterations == 1
        return self.reference or ("adapters" if can_use_adapters else "replicated")

    @property
    def publishes_checkpoints(self) -> bool:
        """Whether checkpoints go into the registry during training, as in runs that write them regularly."""
        return self.checkpoint.keep_in_registry > 0 and self.checkpoint.every_steps < self.num_steps

    @property
    def sampler_dtype(self) -> SamplerDtype:
        """Type of vLLM's weights and activations."""
        return self.sampler.dtype or self.engine.dtype

    def is_operational(self, key: str) -> bool:
        """Return whether a key does not affect the result: without a validated policy, `limits` only fail a run."""
        has_best = self.validation is not None and self.checkpoint.keep_best
        return super().is_operational(key) or (key == "limits" and not has_best)

    def without_effect(self) -> Iterator[str]:
        """Yield a line for each setting that cannot take effect in so few steps, or beside another setting."""
        limits, validation, num_steps = self.limits, self.validation, self.num_steps
        if limits.over_steps >= num_steps and limits != LimitsConfig(over_steps=limits.over_steps):
            yield f"train_grpo.limits: over_steps is {limits.over_steps} and num_steps {num_steps}: no limit applies"
        if validation and validation.patience:
            needed = (1 + validation.patience) * validation.every_steps
            if needed >= num_steps:
                yield f"train_grpo.validation: patience stops after step {needed} or later; num_steps is {num_steps}"
        if self.schedule == "cosine" and self.final_learning_rate_fraction == 1:
            yield "train_grpo.schedule: cosine changes nothing, as final_learning_rate_fraction is 1.0"

    @model_validator(mode="after")
    def _adapters_fit(self) -> "TrainGRPOConfig":
        lora = self.engine.lora
        if self.reference == "adapters":
            _require(lora is not None, "reference: adapters needs engine.lora")
            reason = "the reference of a new iteration is no longer the policy without adapters"
            _require(self.num_iterations == 1, f"reference: adapters needs num_iterations: 1; {reason}")
        for key, sampler in (("vllm", self.sampler.vllm), ("servers", self.sampler.servers)):
            if sampler is not None and sampler.synchronise == "adapters":
                name = f"sampler.{key}.synchronise: adapters"
                fits = lora is not None and lora.rank <= MAX_LORA_RANK
                _require(fits, f"{name} needs engine.lora, with a rank of at most {MAX_LORA_RANK}, the largest of vLLM")
                remedy = "vLLM has the base weights in full; set synchronise: weights"
                _require(not self.engine.quantise, f"{name} does not go with engine.quantise: {remedy}")
        # Weights in 4 bits cannot be copied: their reference can only be the policy with its adapters disabled.
        has_copy = self.loss.kl.coefficient > 0 and self.reference_placement != "adapters"
        rule = "engine.quantise needs reference: adapters, or a loss.kl.coefficient of 0"
        _require(not (self.engine.quantise and has_copy), rule)
        return self

    @model_validator(mode="after")
    def _estimator_fits(self) -> "TrainGRPOConfig":
        if self.advantage.estimator != "mean_scaled":
            return self
        by_source = {f"by_source.{source}": weights for source, weights in self.reward.by_source.items()}
        for key, weights in {"weights": self.reward.weights, **by_source}.items():
            for name, weight in weights.items():
                is_allowed = weight == 0 or (weight > 0 and name not in _REWARDS_BELOW_0)
                rule = f"reward.{key}.{name} can make it negative: remove it, or set z_score or mean_only"
                _require(is_allowed, f"advantage.estimator: mean_scaled divides by the mean reward; {rule}")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "TrainGRPOConfig":
        _require(self.warmup_steps < self.num_steps, "warmup_steps must be smaller than num_steps")
        _require(max(self.profile_steps, default=0) <= self.num_steps, "profile_steps has steps above num_steps")
        _require(self.sampler.max_staleness < self.num_steps, "sampler.max_staleness must be smaller than num_steps")
        for key, divisor in (("num_steps", "num_iterations"), ("prompts_per_step", "minibatches_per_rollout")):
            _require(getattr(self, key) % getattr(self, divisor) == 0, f"{key} must be a multiple of {divisor}")
        has_groups = self.prompts_per_step >= self.engine.num_processes
        _require(has_groups, "prompts_per_step must be engine.num_processes or more: each process samples whole groups")
        buffer, size = self.reward.overlong_buffer_tokens, self.sampling.max_new_tokens
        _require(buffer < size, f"reward.overlong_buffer_tokens must be smaller than the {size} tokens of a completion")
        holds_group = self.sampling.max_batch_size >= self.group_size
        _require(holds_group, "sampling.max_batch_size must hold a group: group_size or more")
        has_use = self.num_iterations == 1 or self.loss.kl.coefficient > 0 or self.reward.model is not None
        _require(has_use, "num_iterations above 1 needs a KL term or a reward model, which a new iteration renews")
        allowed = self.sampler.max_staleness == 0 or not (self.prompts.max_resampling_rounds or self.reward.model)
        _require(allowed, "sampler.max_staleness above 0 needs prompts.max_resampling_rounds: 0 and reward.model: null")
        can_score = self.teacher is None or self.teacher.server is None or self.sampling.temperature == 1
        _require(can_score, "teacher.server needs sampling.temperature: 1, at which a server scores prompts")
        weights = [self.reward.weights, *self.reward.by_source.values()]
        can_learn = self.teacher is not None or any(any(each.values()) for each in weights)
        _require(can_learn, "reward.weights: all are 0, so that nothing would be learned; raise one, or set teacher")
        is_measured = self.limits.max_kl is None or self.loss.kl.coefficient > 0
        _require(is_measured, "limits.max_kl needs a KL term: set loss.kl.coefficient above 0, or the limit to null")
        return self
