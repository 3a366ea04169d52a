"""Convert a GGUF file (of llama.cpp) to a Hugging Face folder: `python -m components.policy.gguf FILE FOLDER`.

Transformers reads the file; quantised weights are written dequantised, in bfloat16.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

_CARD = """---
license: {licence}
---
# {name}

Made from the GGUF file `{file}`, whose weights are of type {type}.
"""
_KEYS = ("name", "license", "file_type")


def convert(file: Path, folder: Path) -> None:
    """Write the model, its tokenizer and a model card with its name and licence into a new folder."""
    from gguf import GGUFReader, LlamaFileType  # transformers reads with it, too

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A new model: transformers marks the loaded one, and its config, as quantised.
    config = type(loaded.config).from_dict(loaded.config.to_diff_dict())
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    fields = GGUFReader(file).fields
    values = {key: fields[f"general.{key}"].contents() for key in _KEYS if f"general.{key}" in fields}
    card = _CARD.format(
        file=file.name,
        name=values.get("name", file.stem),
        licence=values.get("license", "unknown"),
        type=LlamaFileType(values["file_type"]).name if "file_type" in values else "unknown",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
