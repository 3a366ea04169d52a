"""Python: blocks of code that run in the sandbox; those of one trajectory form one program.

No interpreter stays alive between the blocks. The earlier blocks run again before each new one, which therefore sees
their names; so a trajectory can be continued in any process.
"""

import re
from pathlib import Path

from components.environments.environment import ToolEnvironment
from components.grading.sandbox.run import Returned, require_sandbox, run
from components.shared.problem import Problem
from components.shared.tools import CallError, PythonArguments, ToolsConfig

_BLOCKS = (Path(__file__).parent / "python_blocks.py").read_text(encoding="utf-8")
"""The code that runs inside the sandbox, where no module of this package can be imported."""
_MAX_CODE_CHARACTERS = 20_000
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
"""The address in the default `repr` of objects, which differs in each process."""
_CUT = "\n... (cut) ...\n"


class Python(ToolEnvironment):
    """Answers a block of code with its output, the value of its last line, and its error if it fails."""

    name = "python"

    def __init__(self, config: ToolsConfig) -> None:
        arguments = PythonArguments.model_validate(config.arguments)
        super().__init__(config.call_format, arguments.max_calls)
        self._max_characters = arguments.max_output_characters
        self._blocks: list[str] = []

    @staticmethod
    def prepare(_: ToolsConfig) -> None:
        """Raise PipelineError where this machine has no sandbox."""
        require_sandbox()

    def reset(self, problem: Problem) -> None:
        """Begin a program."""
        super().reset(problem)
        self._blocks = []

    def use(self, text: str) -> str:
        """Return the output of a block and add the block to the program; CallError if the sandbox stopped it."""
        blocks = [*self._blocks, text]
        if sum(map(len, blocks)) > _MAX_CODE_CHARACTERS:
            raise CallError(f"all code together is longer than {_MAX_CODE_CHARACTERS:,} characters")
        (outcome,) = run(_BLOCKS, [f"run_blocks({blocks!r})"])
        if not isinstance(outcome, Returned):
            raise CallError(f"the code {outcome.reason}")
        if not isinstance(outcome.value, str):  # the code can forge the result
            raise CallError("the code returned nothing")
        self._blocks = blocks
        output = _ADDRESS.sub("at 0x...", outcome.value.strip("\n"))
        if len(output) > self._max_characters:
            half = self._max_characters // 2
            output = output[: self._max_characters - half] + _CUT + output[len(output) - half :]
        return output or "(no output)"
