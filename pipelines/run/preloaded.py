"""Imports what the training and evaluation stages need, in the process that they are forked from.

It computes nothing: a fork has only one thread, and would wait forever for threads that OpenMP had started. (OpenBLAS
and jemalloc restart their idle threads around a fork.)
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

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process at once while it imports
current_environment()  # cached, because the imported libraries set variables that lineages should not record
for module in _MODULES:
    import_module(module)
gc.freeze()  # a garbage collection in a fork would copy the pages of all these objects
