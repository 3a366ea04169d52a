"""The same run under PPO: a critic beside the policy, with weights, gradients and an optimizer of its own.

The critic is taken to be of the policy's shape, with one output in place of the vocabulary, as PPO's papers have it.
What it computes it computes when the policy does not, so activations and buffers are there once.
"""

from dataclasses import dataclass, replace

from pipelines.planning.hardware import Gpu
from pipelines.planning.memory import Memory, memory_of
from pipelines.planning.model_shape import ModelShape
from pipelines.planning.run import Run
from pipelines.planning.step_time import critic_time, step_time


@dataclass(frozen=True)
class Comparison:
    """What PPO needs beside GRPO, per GPU and step."""

    critic_bytes: float
    states_share: float
    """The critic's share of what both models and the reference hold all the time."""
    peak_share: float
    """Its share of the most that PPO needs."""
    critic_s: float
    time_share: float
    """Its share of a step of PPO."""


def with_critic(run: Run, gpu: Gpu) -> Comparison:
    """Return what a critic would add to a run."""
    memory = memory_of(run)
    critic = _critic_bytes(run, memory)
    seconds = critic_time(run, gpu)
    return Comparison(
        critic_bytes=critic,
        states_share=critic / (critic + memory.states + memory.reference),
        peak_share=critic / (critic + memory.peak),
        critic_s=seconds,
        time_share=seconds / (seconds + step_time(run, gpu).total),
    )


def _critic_bytes(run: Run, memory: Memory) -> float:
    return memory.states * num_critic_parameters(run.shape) / run.shape.num_parameters


def num_critic_parameters(shape: ModelShape) -> int:
    """Return the critic's parameters: without an output layer of its own, but with one output."""
    return replace(shape, tied=True).num_parameters + shape.hidden_size
