import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fake_cluster import ApiServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import kfp
    from kfp import compiler, dsl, kubernetes
    from kfp_server_api import ApiException

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@dsl.component(base_image="light", install_kfp_package=False)  # type: ignore[untyped-decorator]
def _echo(text: str) -> str:
    return text


@dsl.pipeline(name="echo")  # type: ignore[untyped-decorator]
def _pipeline(text: str, times: int = 1, rest: dict[str, Any] = {}) -> None:  # noqa: B006
    task = _echo(text=text)
    kubernetes.set_timeout(task, 60)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled pipeline of two documents with a required parameter."""
    path = tmp_path_factory.mktemp("package") / "echo.yaml"
    compiler.Compiler().compile(_pipeline, str(path))
    return path


@pytest.fixture
def server() -> Iterator[ApiServer]:
    """Kubeflow Pipelines with one user."""
    with ApiServer() as server:
        yield server


def client_of(server: ApiServer, **options: Any) -> Any:
    """The real client."""
    return kfp.Client(host=server.url, **options)


def submit(client: Any, package: Path, **parameters: Any) -> Any:
    """Start a run."""
    experiment = client.create_experiment("tests", namespace=client.get_user_namespace() or None)
    return client.run_pipeline(experiment.experiment_id, "a run", str(package), params=parameters)


def refused(call: Any, *arguments: Any, **options: Any) -> str:
    """The server's words when it refuses."""
    with pytest.raises(ApiException) as error:
        call(*arguments, **options)
    return f"{error.value.status} {error.value.body}"


def test_a_run_goes_through_its_states(server: ApiServer, package: Path) -> None:
    """A run is pending, runs and succeeds as time goes by, and is found by name."""
    client = client_of(server)
    run = submit(client, package, text="a")
    assert client.get_run(run.run_id).state == "PENDING"
    server.clock.advance(10)
    assert client.get_run(run.run_id).state == "RUNNING"
    server.clock.advance(100)
    assert client.get_run(run.run_id).state == "SUCCEEDED"
    assert [each.run_id for each in client.list_runs(sort_by="created_at desc").runs] == [run.run_id]


def test_a_run_is_stopped(server: ApiServer, package: Path) -> None:
    """Terminate ends a run in a while, as failed, and is refused for one that has ended."""
    client = client_of(server)
    run = submit(client, package, text="a")
    client.terminate_run(run.run_id)
    assert client.get_run(run.run_id).state == "CANCELING"
    server.clock.advance(60)
    assert client.get_run(run.run_id).state == "FAILED"
    assert refused(client.terminate_run, run.run_id).startswith("400")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({}, "parameter text is not optional"),
        ({"text": "a", "txet": "b"}, "not required by pipeline: txet"),
        ({"text": 1}, "parameter text requires type string"),
        ({"text": "a", "times": "2"}, "parameter times requires type double or integer"),
        ({"text": "a", "rest": "{}"}, "parameter rest requires type struct"),
    ],
)
def test_parameters_are_held_against_the_pipeline(
    server: ApiServer, package: Path, parameters: dict[str, Any], said: str
) -> None:
    """Unknown, missing and mistyped parameters are refused."""
    assert said in refused(submit, client_of(server), package, **parameters)


def test_a_pipeline_that_lost_its_second_document_is_refused(server: ApiServer, package: Path, tmp_path: Path) -> None:
    """Without platforms.kubernetes neither a run nor an upload is taken."""
    half = tmp_path / "half.yaml"
    half.write_text(yaml.safe_dump(next(yaml.safe_load_all(package.read_text()))))
    client = client_of(server)
    assert "unknown template format" in refused(submit, client, half, text="a")
    assert "was lost on the way" in refused(client.upload_pipeline, str(half), "echo")


def test_pipelines_and_versions_have_names_of_their_own(server: ApiServer, package: Path) -> None:
    """An upload is found by its name; a name that is taken is a conflict; a run may name a version."""
    client = client_of(server)
    uploaded = client.upload_pipeline(str(package), "echo")
    assert refused(client.upload_pipeline, str(package), "echo").startswith("409")
    version = client.upload_pipeline_version(str(package), "second", pipeline_name="echo")
    assert {each.name for each in client.list_pipeline_versions(uploaded.pipeline_id).pipeline_versions} == {
        "echo",
        "second",
    }
    experiment = client.create_experiment("tests")
    run = client.run_pipeline(
        experiment.experiment_id,
        "of a version",
        pipeline_id=uploaded.pipeline_id,
        version_id=version.pipeline_version_id,
        params={"text": "a"},
    )
    assert run.pipeline_version_reference.pipeline_version_id == version.pipeline_version_id


def schedule(client: Any, package: Path, **values: Any) -> Any:
    """Make a recurring run."""
    experiment = client.create_experiment("tests")
    values = {"cron_expression": "0 0 3 * * *", "max_concurrency": 1, "params": {"text": "a"}, **values}
    return client.create_recurring_run(
        experiment.experiment_id, "nightly", pipeline_package_path=str(package), **values
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cron_expression": "0 0 3 * *  * 2026"}, "not a supported format"),
        ({"cron_expression": "0 61 3 * * *"}, "not a supported format"),
        ({"cron_expression": "0 0 3 * * MOO"}, "not a supported format"),
        ({"max_concurrency": 0}, "between 1 and 10"),
        ({"max_concurrency": 11}, "between 1 and 10"),
        ({"params": {}}, "is not optional"),
    ],
)
def test_schedules_are_checked(server: ApiServer, package: Path, values: dict[str, Any], said: str) -> None:
    """A schedule that could never start a run is refused."""
    assert said in refused(schedule, client_of(server), package, **values)


def test_schedules_are_listed_switched_and_deleted(server: ApiServer, package: Path) -> None:
    """A schedule is enabled at first; the trap of five fields is taken, as the real server takes it."""
    client = client_of(server)
    made = schedule(client, package, cron_expression="0 3 * * MON-FRI")
    assert client.get_recurring_run(made.recurring_run_id).status == "ENABLED"
    client.disable_recurring_run(made.recurring_run_id)
    (listed,) = client.list_recurring_runs().recurring_runs
    assert (listed.status, listed.display_name, listed.max_concurrency) == ("DISABLED", "nightly", "1")
    client.delete_recurring_run(made.recurring_run_id)
    assert not client.list_recurring_runs().recurring_runs


def test_profiles_are_kept_apart(server: ApiServer, package: Path) -> None:
    """With several users a request names a namespace, and one that is the user's."""
    server.kfp.multi_user = True
    assert refused(client_of(server).create_experiment, "tests").startswith("400")
    assert refused(client_of(server, namespace="others").create_experiment, "tests").startswith("403")
    assert submit(client_of(server, namespace="team"), package, text="a").run_id


def test_requests_are_authenticated(server: ApiServer) -> None:
    """The token or the cookie is asked for, and is accepted when it is right."""
    server.kfp.token, server.kfp.cookie = "secret", "authservice_session=abc"
    assert refused(client_of(server).list_experiments).startswith("401")
    assert refused(client_of(server, existing_token="wrong").list_experiments).startswith("401")
    client_of(server, existing_token="secret").list_experiments()
    client_of(server, cookies="authservice_session=abc").list_experiments()
