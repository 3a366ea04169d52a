"""Imports what the stages that train and evaluate need, in the process that they are forked from; it computes nothing.

A fork gets no threads but its own, and one that waited for those of OpenMP would hang. (The idle threads of OpenBLAS
and jemalloc are ended and begun again around a fork by themselves.)
"""

import gc
import signal
from importlib import import_module

from components.shared.execution import current_environment

_MODULES = (
    "components.train_sft.worker",
    # DeepSpeed imports the last when it makes an engine, and with it the whole compiler of torch.
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "components.train_sft.__main__",
    "components.train_grpo.__main__",
    "components.train_grpo.worker",
    "components.evaluate.__main__",
    "components.evaluate.worker",
)

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once while it imports
current_environment()  # it is remembered: stages too ask for it before libraries add to it
for module in _MODULES:
    import_module(module)
gc.freeze()  # a collection in a fork would copy the pages of all these objects
