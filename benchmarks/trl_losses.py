"""TRL's own loss and gradient for given completions; runs in TRL's environment (benchmarks/trl-requirements.txt).

Its one argument is a folder with `model/`, `cases.json` (for each case the keys of GRPOConfig, and the name of the
tensor that holds its importance weights, if it has some) and `inputs.safetensors`. `results.safetensors` gets
`<case>/loss` and `<case>/<weight>`, the gradient of each weight. Everything is computed in float64.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def trainer_of(folder: Path, size: int, config: dict[str, Any]) -> GRPOTrainer:
    """Return a trainer of the model, as its documentation builds one."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=size,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        **config,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    data = Dataset.from_dict({"prompt": ["a"] * size})
    return GRPOTrainer(model, lambda **_: [0.0] * size, args=settings, train_dataset=data, processing_class=tokenizer)


def main(folder: Path) -> None:
    """Compute every case."""
    inputs, results = load_file(folder / "inputs.safetensors"), {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        trainer = trainer_of(folder, len(inputs["advantages"]), case["config"])
        given = dict(inputs, num_items_in_batch=inputs["completion_mask"].sum())
        if case["importance_weights"]:
            # Set where vLLM samples, which this comparison does without.
            trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
            given["importance_sampling_ratio"] = inputs[case["importance_weights"]]
        trainer.current_gradient_accumulation_steps = 1
        model = trainer.model.train()
        loss = trainer._compute_loss(model, given)
        loss.backward()
        results[f"{name}/loss"] = loss.detach()
        results |= {f"{name}/{weight}": each.grad for weight, each in model.named_parameters()}
    save_file(results, folder / "results.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
