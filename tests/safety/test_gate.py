"""Dagster's web server behind its gate, attacked as a page or a program of a stranger would."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import dagster as dg
import psutil
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from replay_pipeline.assets.code_location import define
from replay_pipeline.assets.resources import PipelineResource
from replay_pipeline.assets.serve import WithPage
from replay_pipeline.stages.pages.files import page_folder
from replay_pipeline.storage.processes import child_environment
from tests.integration.processes import ui_of, wait_until
from tests.listener import Stranger, stranger
from tests.roots import pipeline_at, project_root
from tests.safety.commands import program
from tests.safety.strange_folder import fill
from tests.support.dagster_web import address, graphql, process_tree
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

KEYS = {"OPENROUTER_API_KEY": "sk-or-v1-planted-0123456789", "OTHER_TOKEN": "planted-9876543210"}


@dataclass
class Ui:
    """A running `replay-pipeline ui`."""

    url: str
    token: str
    root: Path
    listener: Stranger
    ran: Path
    pid: int

    @property
    def cookie(self) -> str:
        """What a browser has that was let in."""
        return f"replay-pipeline-{urlsplit(self.url).port}={self.token}"


@pytest.fixture(scope="module")
def ui(tmp_path_factory) -> Iterator[Ui]:
    """One UI for all attacks, started in a stranger's folder."""
    folder = tmp_path_factory.mktemp("gate")
    ran = fill(folder / "cloned")
    project_root(folder / "data").find_batches()
    log, port = folder / "ui.log", free_port()
    environment = child_environment(**KEYS, REPLAY_SETTINGS=str(folder / "data" / "settings.toml"))
    command = [program(), "ui", "--data", str(folder / "data"), "--port", str(port)]
    with (
        stranger() as listener,
        ui_of(command, log, cwd=folder / "cloned", env=environment) as (url, process),
    ):
        wait_until(lambda: has_code_location(url), process, log=log)
        token = address(log).partition("token=")[2]
        yield Ui(url, token, folder / "data", listener, ran, process.pid)


def has_code_location(url: str) -> bool:
    found = graphql(
        url, "{ repositoriesOrError { ... on RepositoryConnection { nodes { name } } } }"
    )
    return bool(found["repositoriesOrError"].get("nodes"))


def ask(ui: Ui, method: str, path: str, body: str | None = None, **headers: str) -> int:
    """One request as it is, with no header that was not asked for; returns the status."""
    place = urlsplit(ui.url)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"host": place.netloc, **{k.replace("_", "-"): v for k, v in headers.items()}}
        data = None if body is None else body.encode()
        if data is not None:
            sent["content-length"] = str(len(data))
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders(data)
        return connection.getresponse().status


def launching(ui: Ui) -> str:
    """A mutation that starts a run with settings from the stranger's server."""
    config = json.dumps(
        {"resources": {"pipeline": {"config": {"settings_path": f"{ui.listener.url}/s.toml"}}}}
    )
    batch = pipeline_at(ui.root).batches()[0]
    return (
        "mutation { launchRun(executionParams: {selector: {repositoryLocationName: "
        '"replay_pipeline", repositoryName: "__repository__", pipelineName: "replay_batches"}, '
        f'mode: "default", runConfigData: {json.dumps(config)}, executionMetadata: {{tags: [{{key: '
        f'"dagster/partition", value: "{batch}"}}]}}}}) {{ __typename }} }}'
    )


def n_runs(ui: Ui) -> int:
    found = graphql(ui.url, "{ runsOrError { ... on Runs { results { runId } } } }")
    return len(found["runsOrError"]["results"])


def websocket(ui: Ui, **headers: str) -> int:
    return ask(
        ui, "GET", "/graphql", upgrade="websocket", connection="Upgrade", sec_websocket_version="13",
        sec_websocket_key="x3JJHMbDL1EzLkh9GBhXDw==", sec_websocket_protocol="graphql-ws", **headers,
    )  # fmt: skip


def test_no_attack_starts_a_run_or_is_answered(ui):
    mutation = launching(ui)
    query = f"/graphql?query={quote(mutation)}"
    body = json.dumps({"query": mutation})
    own, cookie = ui.url, ui.cookie
    port = urlsplit(own).port
    as_json = {"content_type": "application/json"}
    attacks = {
        "a picture in a page of another site": ("GET", query, None, {"sec_fetch_site": "cross-site"}),
        "the same where the cookie is sent": (
            "GET", query, None, {"cookie": cookie, "sec_fetch_site": "same-site"},
        ),
        "a link": ("GET", query, None, {"cookie": cookie}),
        "a page of another port of this machine": (
            "POST", "/graphql", body, {"cookie": cookie, "origin": f"http://127.0.0.1:{port + 1}", **as_json},
        ),
        "a form": ("POST", "/graphql", body, {"cookie": cookie, "origin": own, "content_type": "text/plain"}),
        "a form with fields": (
            "POST", "/graphql", f"query={quote(mutation)}",
            {"cookie": cookie, "origin": own, "content_type": "application/x-www-form-urlencoded"},
        ),
        "a page without an origin": ("POST", "/graphql", body, {"cookie": cookie, "origin": "null", **as_json}),
        "nobody says from where": ("POST", "/graphql", body, {"cookie": cookie, **as_json}),
        "another program of this machine": ("POST", "/graphql", body, {"origin": own, **as_json}),
        "a guessed token": (
            "POST", "/graphql", body, {"cookie": cookie[:-1] + "~", "origin": own, **as_json},
        ),
        "a name that leads here": (
            "POST", "/graphql", body,
            {"host": f"evil.example:{port}", "cookie": cookie, "origin": f"http://evil.example:{port}", **as_json},
        ),
        "a name that leads here, without more": ("GET", query, None, {"host": "evil.example"}),
        "the token under another name": (
            "GET", f"/?token={ui.token}", None, {"host": f"evil.example:{port}"},
        ),
        "a question before one is asked": (
            "OPTIONS", "/graphql", None, {"cookie": cookie, "origin": "https://evil.example"},
        ),
        "a report of an asset that was never made": (
            "POST", "/report_asset_materialization/dpo_pairs", "{}",
            {"cookie": cookie, "origin": "https://evil.example", **as_json},
        ),
        "the logs": ("GET", "/logs/x", None, {}),
        "the first page": ("GET", "/", None, {}),
    }  # fmt: skip
    answers = {
        name: ask(ui, method, path, sent, **headers)
        for name, (method, path, sent, headers) in attacks.items()
    }
    assert {name: n for name, n in answers.items() if n not in (401, 403, 405, 421)} == {}
    assert n_runs(ui) == 0
    assert ui.listener.heard == []


def test_a_websocket_is_for_our_own_pages(ui):
    assert websocket(ui, cookie=ui.cookie, origin=ui.url) == 101
    assert websocket(ui, cookie=ui.cookie, origin="https://evil.example") == 403
    assert websocket(ui, cookie=ui.cookie) == 403
    assert websocket(ui, origin=ui.url) == 403
    assert websocket(ui, cookie=ui.cookie, origin=ui.url, host="evil.example") == 403


def test_a_person_with_the_printed_address_is_let_in_and_a_run_takes_no_settings_path(ui):
    assert ask(ui, "GET", f"/?token={ui.token}") == 303
    assert ask(ui, "GET", "/runs", cookie=ui.cookie, sec_fetch_site="same-origin") == 200
    localhost = f"localhost:{urlsplit(ui.url).port}"
    # The first page leads to the page of `look`, which only somebody with the token may see.
    assert ask(ui, "GET", "/", cookie=ui.cookie, host=localhost) == 303
    assert ask(ui, "GET", "/look/index.html", cookie=ui.cookie, host=localhost) == 200
    assert ask(ui, "GET", "/look/index.html") == 401
    for site, status in (("same-origin", 200), ("cross-site", 403)):
        told = ask(ui, "GET", "/look/data/overview.js", cookie=ui.cookie, sec_fetch_site=site)
        assert told == status
    assert ask(ui, "GET", "/look/../settings.toml", cookie=ui.cookie) == 404
    assert ask(ui, "GET", "/look/%2e%2e/settings.toml", cookie=ui.cookie) == 404
    launched = graphql(ui.url, launching(ui))["launchRun"]["__typename"]
    assert launched == "RunConfigValidationInvalid"
    assert n_runs(ui) == 0
    assert ui.listener.heard == []


def test_only_loopback_listens_and_no_second_door_is_open(ui):
    found = set()
    for pid in process_tree(ui.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {
                s.laddr for s in psutil.Process(pid).net_connections() if s.status == "LISTEN"
            }
    assert found == {("127.0.0.1", urlsplit(ui.url).port)}


def test_nothing_of_the_folder_it_is_started_in_runs_and_no_other_key_is_handed_on(ui):
    assert not ui.ran.exists()
    for pid in process_tree(ui.pid):
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"OTHER_TOKEN" not in environment


@pytest.mark.parametrize("field", ["settings_path", "data_dir"])
def test_where_settings_and_data_are_is_no_run_configuration(field):
    # Loading asks the newest instance of this process, which another test may have left closed.
    with dg.DagsterInstance.ephemeral():
        job = define(PipelineResource()).resolve_job_def("publish")
    with (
        dg.instance_for_test() as instance,
        pytest.raises(dg.DagsterInvalidConfigError, match=field),
    ):
        job.execute_in_process(
            instance=instance,
            run_config={"resources": {"pipeline": {"config": {field: "http://127.0.0.1:1/s"}}}},
        )


def test_the_served_page_may_read_one_file_of_its_server_and_from_disk_none(tmp_path):
    with page_folder(tmp_path / "look") as files:
        files.add("overview", {})
    told = (tmp_path / "look" / "index.html").read_text("utf-8")
    assert "connect-src" not in told
    assert "default-src 'none'" in told
    client = TestClient(WithPage(Starlette(), tmp_path / "look"), base_url="http://127.0.0.1:3111")
    served = client.get("/look/index.html").text
    assert served == told.replace(
        "default-src", "connect-src http://127.0.0.1:3111/robots.txt; default-src", 1
    )
