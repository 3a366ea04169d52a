"""Imports that the training and evaluation stages need, in the process that they are forked from; it computes nothing.

A fork has only one thread, and would hang if it waited for threads of OpenMP. (OpenBLAS and jemalloc restart their idle
threads around a fork.)
"""

import gc
import signal
from importlib import import_module

from components.shared.execution import current_environment

_MODULES = (
    "components.train_sft.worker",
    # DeepSpeed imports this module when it makes an engine, and with it torch's compiler.
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "components.train_sft.__main__",
    "components.train_grpo.__main__",
    "components.train_grpo.worker",
    "components.evaluate.__main__",
    "components.evaluate.worker",
)

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once while it imports
current_environment()  # cached: stages record it as it was before libraries add to it
for module in _MODULES:
    import_module(module)
gc.freeze()  # a garbage collection in a fork would copy the pages of all these objects
