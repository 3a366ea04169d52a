import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HEAD = "lm_head.weight differs from the model.embed_tokens.weight that was sent"
_LAST = "model.norm.weight differs from the model.norm.weight that was sent"


@pytest.mark.long
@pytest.mark.parametrize(("processes", "kind", "dtype"), [(1, "untied", "bfloat16"), (2, "tied", "float32")])
def test_every_tensor_of_a_real_model_is_compared(tmp_path: Path, processes: int, kind: str, dtype: str) -> None:
    """Right weights pass, however they are split, fused and rounded; a tensor that differs by 1e-6 is named."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    variables = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables["VLLM_DIST_IDENT"] = tmp_path.name  # of the memory that its processes share
    ended = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "tests.rollout.vllm_processes", "weights", str(tmp_path), kind, dtype],
        cwd=Path(__file__).parents[2],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in range(processes):
        results = json.loads((tmp_path / f"results-{rank}.json").read_text())
        assert len(results.pop("behind")) > 5
        assert results == {
            "started": [],
            "loaded": [_HEAD] if kind == "tied" else [],
            "renewed": [],
            "by both names": [],
            "not sent": ["model.layers.0.mlp.down_proj.weight is not loaded, or only in part"],
            "one element": [_LAST],
            "another form": ["model.norm.weight has a form that cannot be compared"],
        }
