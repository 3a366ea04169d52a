"""One whole GRPO optimizer step with tools: the tool loop of TRL's GRPOTrainer and this project's, in turns.

`python benchmarks/tools.py` has both sample trajectories of some turns, each of a fixed number of tokens, which a tool
answers with a fixed number of words, and train on them. Model, prompts, rewards and settings are those of grpo_step.py,
but for a chat template in words, in which every message has two tokens of its own.
"""

import argparse
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from case import Row, save_model, write_case
from environments import python_of
from results import FOLDER, Progress, Result, machine, record, versions
from side import Reply, Side, take_turns

_HERE = Path(__file__).parent
_ROWS = ("4x8:117/3x32+16", "4x8:117/6x16+16")
_MAX_IDLE = 0.05
"""Share of a core that a waiting trainer may use: it would be taken from the one that is measured."""
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""See grpo_step.py."""
_NAMES = {"trl": "TRL, all in one pass", "trl_tuned": "TRL, tuned", "own": "this project"}
_TEMPLATE = (
    "{%- for m in messages -%}<{{ m.role }}> {{ m.content }}"
    "{%- for call in m.tool_calls or [] %} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    " <eos> {% endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)


@dataclass(frozen=True)
class TurnsRow:
    """The size of one optimizer step."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    num_turns: int
    turn_tokens: int
    """Tokens of each turn, its end token included."""
    observation_tokens: int
    """Words of the tool's answer."""

    @classmethod
    def parse(cls, text: str) -> "TurnsRow":
        """Read `4x8:117/3x32+16`: 4 prompts of 117 tokens, 8 trajectories of each, of 3 turns of 32 with 16 between."""
        match = re.fullmatch(r"(\d+)x(\d+):(\d+)/(\d+)x(\d+)\+(\d+)", text)
        if match is None:
            raise ValueError(f"{text} is no row; PROMPTSxGROUP:PROMPT/TURNSxTOKENS+OBSERVATION is expected")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        turns = f"{self.num_turns}x{self.turn_tokens}+{self.observation_tokens}"
        return f"{self.num_prompts}x{self.group_size}:{self.prompt_tokens}/{turns}"

    @property
    def length(self) -> int:
        """Tokens of a trajectory after its prompt; an answer has an end token, and two names of roles around it."""
        return self.num_turns * self.turn_tokens + (self.num_turns - 1) * (self.observation_tokens + 3)


def main() -> None:
    """Measure the rows asked for, print each, and record it as soon as it is measured."""
    options = _options()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pythons = {name: Path(sys.executable) if name == "own" else python_of("trl") for name in _asked(options)}
    on = machine(torch.get_num_threads())
    installed = versions(Path(sys.executable), "torch", "transformers") | versions(python_of("trl"), "trl")
    settings = {key: getattr(options, key) for key in ("trl_batch_size", "micro_batch_tokens", "rounds")}
    print(f"{on['processor']}, {on['threads']} threads, torch {torch.__version__}")
    progress = Progress(len(options.rows) * len(pythons) * (options.warm_up + options.rounds))
    for row in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            figures = _measure(options, pythons, row, Path(folder), progress)
        print("\n".join(_lines(row, figures)))
        identity = {"row": str(row), "model": "13m", "trainers": list(pythons)}
        path = record(options.out, "tools", on, identity, {"versions": installed, "settings": settings, **figures})
        print(f"recorded in {path}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=_ROWS, help="PROMPTSxGROUP:PROMPT/TURNSxTOKENS+OBSERVATION")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each trainer")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each trainer before them")
    parser.add_argument("--only", choices=tuple(_NAMES), help="measure one trainer alone")
    parser.add_argument("--trl-batch-size", type=int, default=4, help="completions per forward pass of TRL, tuned")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024, help="tokens per forward pass of our update")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder of results")
    options = parser.parse_args()
    try:
        options.rows = [TurnsRow.parse(text) for text in options.rows]
    except ValueError as error:
        parser.error(str(error))
    return options


def _asked(options: argparse.Namespace) -> list[str]:
    return [options.only] if options.only else list(_NAMES)


def _measure(
    options: argparse.Namespace, pythons: Mapping[str, Path], row: TurnsRow, folder: Path, progress: Progress
) -> Result:
    """Return what a row costs each trainer, in turns, and the ratios to this project's."""
    model, num_parameters = save_model(folder / "model", model="13m", dtype=torch.float32)
    (folder / "model" / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    # The role of the user, the end of its message and the role of the assistant are part of the prompt.
    words = Row(row.num_prompts, row.group_size, row.prompt_tokens - 3, row.length, row.length)
    observation = " ".join(
        random.Random(1).choices([f"w{index}" for index in range(3, 1000)], k=row.observation_tokens)
    )
    for name in pythons:
        write_case(
            folder / f"{name}.json",
            words,
            model=folder / "model",
            vocabulary_size=model.vocab_size,
            num_steps=options.warm_up + options.rounds,
            num_turns=row.num_turns,
            turn_tokens=row.turn_tokens,
            observation=observation,
            device="cpu",
            dtype="float32",
            learning_rate=1e-6,
            kl_coefficient=0.04,
            trl_batch_size=options.trl_batch_size if name == "trl_tuned" else row.num_prompts * row.group_size,
            micro_batch_tokens=options.micro_batch_tokens,
        )
    steps = _steps(options, pythons, folder, row, progress)
    sides = {name: _figures(taken) for name, taken in steps.items()}
    own = sides.get("own")
    ratios = {
        f"{name}_to_own_{what}": side[key] / own[key]
        for name, side in sides.items()
        for what, key in (
            ("seconds", "seconds"),
            ("cpu", "cpu_s"),
            ("sampling", "sampling_s"),
            ("memory", "peak_bytes"),
        )
        if own and name != "own"
    }
    return {"num_parameters": num_parameters, **sides, "ratios": ratios}


def _steps(
    options: argparse.Namespace, pythons: Mapping[str, Path], folder: Path, row: TurnsRow, progress: Progress
) -> dict[str, list[Reply]]:
    """Return each trainer's measured steps; all trajectories must have the length of the row."""
    sides: dict[str, Side] = {}

    cpu_s: dict[str, float] = {}

    def ended(name: str, turn: str, step: Reply) -> None:
        now = sides[name].cpu_s()
        step["cpu_s"], cpu_s[name] = now - cpu_s[name], now
        progress.done(f"{row}, {_NAMES[name]}, {turn}", step["seconds"])

    try:
        for name, python in pythons.items():
            script = _HERE / ("own_tools.py" if name == "own" else "trl_tools.py")
            memory = _KEEP_MEMORY if name == "trl_tuned" else {}
            hidden = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
            sides[name] = Side(script, python, folder / f"{name}.json", {**hidden, **memory})
            cpu_s[name] = sides[name].cpu_s()
        take_turns(sides, options.warm_up, "warm-up", ended)
        steps, share = take_turns(sides, options.rounds, "round", ended)
    finally:
        for side in sides.values():
            side.close()
    wanted = [row.length] * (row.num_prompts * row.group_size)
    assert all(step["lengths"] == wanted for taken in steps.values() for step in taken), steps
    if share > _MAX_IDLE:
        raise SystemExit(f"{row}: a waiting trainer used {share:.0%} of a core; the measurement is worth nothing")
    return steps


def _figures(steps: list[Reply]) -> Result:
    return {
        "seconds": statistics.median(step["seconds"] for step in steps),
        "cpu_s": statistics.median(step["cpu_s"] for step in steps),
        "sampling_s": statistics.median(step["sampling_s"] for step in steps),
        "peak_bytes": steps[-1]["peak_bytes"],
        "steps_s": [step["seconds"] for step in steps],
    }


def _lines(row: TurnsRow, result: Result) -> list[str]:
    lines = [f"{row}: {row.num_turns} turns, {row.length} tokens after the prompt"]
    for name, called in _NAMES.items():
        if side := result.get(name):
            lines.append(
                f"  {called:<22}{side['seconds']:8.3f} s/step ({side['sampling_s']:.3f} s of it sampling), "
                f"{side['cpu_s']:.3f} s of a processor, peak {side['peak_bytes'] / 1e9:.2f} GB"
            )
    for name in ("trl", "trl_tuned"):
        if f"{name}_to_own_seconds" in result["ratios"]:
            seconds, sampling, cpu, memory = (
                result["ratios"][f"{name}_to_own_{what}"] for what in ("seconds", "sampling", "cpu", "memory")
            )
            lines.append(
                f"  {_NAMES[name]} takes {seconds:.2f} x the time ({sampling:.2f} x in sampling), "
                f"{cpu:.2f} x the processor time and {memory:.2f} x the memory"
            )
    return lines


if __name__ == "__main__":
    main()
