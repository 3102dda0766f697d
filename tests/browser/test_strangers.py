"""A page of another origin in a browser that was let in to Dagster: it starts nothing, reads nothing."""

import json
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, Page

from tests.browser.serving import ADDRESSES, CHROMIUM, FLAGS, PATIENCE_MS, serving
from tests.listener import Stranger, stranger
from tests.roots import sample_root
from tests.support.dagster_web import graphql

LAUNCH = (
    'mutation { launchRun(executionParams: {selector: {repositoryLocationName: "replay_pipeline", '
    'repositoryName: "__repository__", pipelineName: "replay_batches"}, mode: "default", '
    'runConfigData: {}, executionMetadata: {tags: [{key: "dagster/partition", value: "BATCH"}]}}) '
    "{ __typename } }"
)
RUNS = "{ runsOrError { ... on Runs { results { runId } } } }"

ATTACKS = """async ({url, launch, heard}) => {
  const told = {};
  const attempt = async (name, what) => {
    try { told[name] = await what(); } catch (error) { told[name] = 'refused'; }
  };
  const body = JSON.stringify({query: launch});
  const read = options => async () => (await (await fetch(url + '/graphql', options)).text());
  const send = options => async () => (await fetch(url + '/graphql', options)).type;
  const json = {'content-type': 'application/json'};
  await attempt('json with cookies', read({method: 'POST', headers: json, body, credentials: 'include'}));
  await attempt('text with cookies', read({method: 'POST', body, credentials: 'include'}));
  await attempt('blind text', send({method: 'POST', body, credentials: 'include', mode: 'no-cors'}));
  await attempt('get', read({credentials: 'include', method: 'GET'}));
  await attempt('blind get', async () => (await fetch(
    url + '/graphql?query=' + encodeURIComponent(launch), {credentials: 'include', mode: 'no-cors'})).type);
  await attempt('picture', () => new Promise((done, fail) => {
    const image = new Image();
    image.onload = () => done('shown');
    image.onerror = fail;
    image.src = url + '/graphql?query=' + encodeURIComponent(launch);
  }));
  await attempt('script', () => new Promise((done, fail) => {
    const script = document.createElement('script');
    script.onload = () => done('ran');
    script.onerror = fail;
    script.src = url + '/';
    document.head.append(script);
  }));
  await attempt('websocket', () => new Promise((done, fail) => {
    const socket = new WebSocket(url.replace('http', 'ws') + '/graphql', 'graphql-ws');
    socket.onopen = () => done('open');
    socket.onerror = fail;
  }));
  await attempt('beacon', async () => {
    navigator.sendBeacon(url + '/graphql', new Blob([body], {type: 'text/plain'}));
    return 'opaque';
  });
  await attempt('form', () => new Promise(done => {
    const frame = document.createElement('iframe');
    frame.name = 'target';
    frame.onload = () => { let text = 'refused';
      try { text = frame.contentDocument.body.innerText; } catch (error) {} done(text); };
    document.body.append(frame);
    const form = document.createElement('form');
    form.method = 'POST'; form.enctype = 'text/plain'; form.target = 'target';
    form.action = url + '/graphql';
    const field = document.createElement('input');
    field.name = body.slice(0, -1) + ', "x": "'; field.value = '"}';
    form.append(field); document.body.append(form); form.submit();
  }));
  return told;
}"""
"""What a page can try, as the best of them would; gives what it could read."""


@pytest.fixture(scope="module")
def batches_and_url(tmp_path_factory) -> Iterator[tuple[list[str], str]]:
    root = tmp_path_factory.mktemp("strangers") / "data"
    work = sample_root(root)
    work.find_batches()
    with serving(root) as url:
        yield work.batches(), url


@pytest.fixture(scope="module")
def evil() -> Iterator[Stranger]:
    with stranger({"/evil": "<!doctype html><title>evil</title><body>"}) as found:
        yield found


def attack(page: Page, at: str, url: str, batch: str) -> dict[str, str]:
    page.set_default_timeout(PATIENCE_MS)
    page.goto(at)
    launch = LAUNCH.replace("BATCH", batch)
    told = page.evaluate(ATTACKS, {"url": url, "launch": launch, "heard": at})
    page.goto(f"{url}/graphql?query={quote(launch)}")  # a link that somebody clicks
    return told


def n_runs(url: str) -> int:
    return len(graphql(url, RUNS)["runsOrError"]["results"])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_origin_starts_nothing_and_reads_nothing(
    browser: Browser, batches_and_url, evil, host
):
    batches, url = batches_and_url
    context = browser.new_context()
    page = context.new_page()
    page.goto(ADDRESSES[url])
    assert page.context.cookies()[0]["sameSite"] == "Strict"
    at = evil.url.replace("127.0.0.1", host)
    told = attack(page, f"{at}/evil", url, batches[0])
    # A frame is empty before the answer to the form is in it.
    assert set(told.values()) <= {"refused", "opaque", ""}, told
    assert n_runs(url) == 0
    assert "launchRun" not in json.dumps(evil.heard)
    context.close()


def test_a_name_that_leads_to_this_machine_is_told_nothing(browser: Browser, batches_and_url):
    """After DNS rebinding the attacker's page and our server have one origin: only the host tells."""
    batches, url = batches_and_url
    port = urlsplit(url).port
    rules = [*FLAGS, "--host-resolver-rules=MAP rebound.example 127.0.0.1"]
    rebound = browser.browser_type.launch(executable_path=CHROMIUM, args=rules)
    page = rebound.new_page()
    page.goto(ADDRESSES[url])
    place = f"http://rebound.example:{port}"
    answered = page.goto(f"{place}/")
    assert answered is not None
    assert answered.status == 421
    told = attack(page, f"{place}/", place, batches[0])
    assert not any("launchRun" in text or "data" in text for text in told.values()), told
    assert n_runs(url) == 0
    rebound.close()


def test_a_person_sees_dagster_with_the_printed_address_and_nobody_without(
    browser: Browser, batches_and_url
):
    _, url = batches_and_url
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    refused = page.goto(url)
    assert refused is not None
    assert refused.status == 401
    page.goto(ADDRESSES[url])
    assert "token" not in page.url
    page.goto(f"{url}/asset-groups")
    page.get_by_text("teacher_actions").first.wait_for()
    context.close()
