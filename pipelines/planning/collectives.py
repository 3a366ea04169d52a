"""How long processes take to exchange tensors: rings over the links within a node and the network between nodes."""

from dataclasses import dataclass

from pipelines.planning.hardware import Gpu

_NODE_HOP_S = 1e-6
"""Time for a message to pass from a GPU to the next of its node (assumed)."""
_NETWORK_HOP_S = 5e-6
"""The same between nodes (assumed)."""
_LINK_FRACTION = 0.8
"""Of the rate of the slowest link that is reached (assumed)."""


@dataclass(frozen=True)
class Network:
    """The links among GPUs that train together."""

    gpu: Gpu
    num_gpus: int

    def gather_s(self, num_bytes: float, num_calls: int = 1) -> float:
        """Return the seconds in which each GPU has the shards of all; to sum and scatter takes as long.

        `num_bytes` are those of the whole, in `num_calls` collectives one after the other.
        """
        if self.num_gpus == 1:
            return 0.0
        share = (self.num_gpus - 1) / self.num_gpus
        return num_bytes * share / (_LINK_FRACTION * self._rate) + num_calls * self._latency_s

    def reduce_s(self, num_bytes: float, num_calls: int = 1) -> float:
        """Return the seconds in which each GPU has the sum over all."""
        return 2 * self.gather_s(num_bytes, num_calls)

    @property
    def _rate(self) -> float:
        """Bytes per second through a GPU. A ring over nodes crosses each boundary once per card."""
        return min(self.gpu.node_rate, self._network_rate) if self._num_nodes > 1 else self.gpu.node_rate

    @property
    def _network_rate(self) -> float:
        return self.gpu.network_rate * self.gpu.gpus_per_node

    @property
    def _latency_s(self) -> float:
        between = self._num_nodes - 1
        return between * _NETWORK_HOP_S + (self.num_gpus - 1 - between) * _NODE_HOP_S

    @property
    def _num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpu.gpus_per_node)
