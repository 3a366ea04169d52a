"""Runs vLLM servers of a checkpoint until it is killed: what a run does, for a test to kill it.

`python -m tests.rollout.launch_servers CHECKPOINT LOGS`
"""

import sys
import time
from pathlib import Path

from components.cluster.servers import vllm_servers
from components.rollout.vllm.config import ServersConfig

CONFIG = ServersConfig(
    num_servers=1,
    max_tokens=512,
    cache_gib=0.25,
    compile=False,
    start_deadline_s=600,
    request_deadline_s=60,
    lost_deadline_s=120,
    weights_by="gloo",
)

if __name__ == "__main__":
    with vllm_servers(Path(sys.argv[1]), CONFIG, dtype="float32", logs=Path(sys.argv[2])) as urls:
        print("urls", *urls, flush=True)
        time.sleep(600)
