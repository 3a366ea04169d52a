"""The extension of vLLM's worker; it runs in vLLM's own processes."""

import multiprocessing
import os
import select
import shutil
import signal
import threading
from contextlib import suppress
from typing import Any

import components.rollout.vllm.gloo  # noqa: F401  # registers the backend with vLLM
from components.rollout.vllm.loaded_weights import loaded_weights, renew_output_layer
from components.rollout.vllm.verification import LoadedWeights
from components.shared.environment import OWNER_VARIABLE


class WeightLoading:
    """Mixed into vLLM's worker, which calls its methods by name (`collective_rpc`)."""

    weights_version = ""

    def load_folder(self, folder: str, version: str) -> None:
        """Load the weights of a Hugging Face folder, unless that version is loaded: several clients may ask for it."""
        if self.weights_version == version:
            return
        worker: Any = self
        self.weights_version = ""
        worker.reload_weights(weights_path=folder)
        renew_output_layer(worker.model_runner.get_model())
        self.weights_version = version

    def loaded_weights(self, shapes: dict[str, list[int]]) -> LoadedWeights:
        """Return the weights that this process computes with, given the shapes of the tensors that it was sent."""
        from vllm.config import set_current_vllm_config

        worker: Any = self
        with set_current_vllm_config(worker.vllm_config):
            return loaded_weights(worker.model_runner.get_model(), shapes, worker.vllm_config.model_config.dtype)


def _end_with_owner(owner: int) -> None:
    """End vLLM's processes once the one they work for has ended, in whatever way: by themselves they would go on."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "vLLM starts its workers by multiprocessing"
    with suppress(ProcessLookupError):  # the owner has ended before
        poll = select.poll()
        poll.register(os.pidfd_open(owner), select.POLLIN)
        poll.poll()
    if parent.pid is not None and parent.pid != owner and parent.is_alive():
        os.kill(parent.pid, signal.SIGKILL)  # vLLM's engine, between the owner and this worker
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os._exit(1)


if OWNER_VARIABLE in os.environ:
    threading.Thread(target=_end_with_owner, args=(int(os.environ[OWNER_VARIABLE]),), daemon=True).start()
