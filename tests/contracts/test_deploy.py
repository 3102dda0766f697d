"""The files of `deploy/`: what they name exists, nothing secret is in them, nothing runs as root."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from replay_pipeline.settings import Settings
from tools import run_deploy as run

REPO = Path(__file__).parents[2]
DEPLOY = REPO / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc")
CONTAINERFILE = (DEPLOY / "Containerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
HELM = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text("utf-8"))
NIGHTLY = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "nightly.yaml").read_text("utf-8")))
[JOB] = [
    each["spec"]["jobTemplate"]["spec"]["template"] for each in NIGHTLY if each["kind"] == "CronJob"
]
"""The pod of the nightly job."""
SECRETS = {
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OPENROUTER_API_KEY", "POSTGRES_PASSWORD",
    "REPLAY_DAGSTER_DB", "REPLAY_LEDGER", "REPLAY_SALT", "REPLAY_WEBHOOK",
}  # fmt: skip


def every_mapping(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        return [value, *(m for each in value.values() for m in every_mapping(each))]
    if isinstance(value, list):
        return [m for each in value for m in every_mapping(each)]
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_variable_that_is_named_is_read_somewhere(path):
    named = set(re.findall(r"\bREPLAY_[A-Z_]+", path.read_text("utf-8")))
    assert not {n for n in named if f'"{n}"' not in read_by_the_code()}


def read_by_the_code() -> str:
    return "".join(p.read_text("utf-8") for p in (REPO / "replay_pipeline").rglob("*.py"))


def test_the_settings_of_the_nightly_job_are_settings(tmp_path):
    (text,) = [each["data"]["settings.toml"] for each in NIGHTLY if each["kind"] == "ConfigMap"]
    fields = tomllib.loads(text)
    settings = Settings.load(changes=fields, env={})
    assert settings.replay.max_total_usd == fields["replay"]["max_total_usd"] > 0


def test_no_secret_has_a_value():
    for document in (COMPOSE, HELM, *NIGHTLY):
        for mapping in every_mapping(document):
            for name in SECRETS & mapping.keys():
                unfilled = re.sub(r"\$\{\w+(:[-?][^}]*)?\}", "", str(mapping[name]))
                assert "${" in str(mapping[name]), name
                assert not re.search(r":[^/@]+@", unfilled), name
            if mapping.get("name") in SECRETS:
                assert "value" not in mapping
    example = (DEPLOY / ".env.example").read_text("utf-8")
    for line in example.splitlines():
        name, _, value = line.partition("=")
        assert name not in SECRETS or value == ""


def test_only_the_service_that_asks_teachers_has_the_keys():
    with_keys = {
        name
        for name, service in COMPOSE["services"].items()
        if {"OPENROUTER_API_KEY", "HF_TOKEN"} & set(service.get("environment", {}))
    }
    assert with_keys == {"code"}


def test_images_are_pinned_and_nothing_runs_as_root():
    images = [m["image"] for d in (COMPOSE, *NIGHTLY) for m in every_mapping(d) if "image" in m]
    bases = re.findall(r"^FROM (\S+)", CONTAINERFILE, re.MULTILINE)
    (version,) = re.findall(r"^ARG PYTHON=(.*)$", CONTAINERFILE, re.MULTILINE)
    images += [base.replace("${PYTHON}", version) for base in bases]
    assert len(images) >= 5
    assert all(re.search(r":\d+\.\d+", image) for image in images), images
    (user,) = re.findall(r"^USER (\d+):", CONTAINERFILE, re.MULTILINE)
    assert int(user) > 0
    assert "HEALTHCHECK" in CONTAINERFILE
    pod = JOB["spec"]
    (deployment,) = HELM["dagster-user-deployments"]["deployments"]
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert deployment["podSecurityContext"]["runAsUser"] == int(user)
    of_runs = HELM["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]
    assert of_runs["podSpecConfig"]["securityContext"] == deployment["podSecurityContext"]
    assert "resources" not in of_runs["containerConfig"], (
        "the chart puts the deployment's over them"
    )
    contexts = (pod["containers"][0], deployment, of_runs["containerConfig"])
    for context in (each["securityContext"] for each in contexts):
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    for name, service in COMPOSE["services"].items():
        if name != "db":
            assert service["read_only"]
            assert service["cap_drop"] == ["ALL"]


def test_runs_wait_in_a_queue_with_limits_wherever_they_are():
    """Without its queue the chart would start each run at once, whatever the limits are."""
    assert "runCoordinator" not in HELM["dagsterDaemon"]
    assert HELM["concurrency"] == {
        "enabled": True,
        "runs": {"maxConcurrentRuns": 2},
        "pools": {"defaultLimit": 1, "granularity": "op"},
    }


def test_the_image_has_what_it_is_told_to_have():
    project = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", CONTAINERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (REPO / name).exists(), name
    allowed = (DEPLOY / "Containerfile.dockerignore").read_text("utf-8").splitlines()
    for name in " ".join(copied).split():
        assert f"!{name}" in allowed, name
    assert f":{project['version']}" in COMPOSE["services"]["code"]["image"]


def test_commands_of_the_services_exist():
    from replay_pipeline.cli import app

    commands = {info.name or info.callback.__name__ for info in app.registered_commands}
    text = "".join(path.read_text("utf-8") for path in FILES)
    used = set(re.findall(r"replay-pipeline[, ]+(run|ingest|ui)\b", text))
    assert {"run", "ui"} <= used <= commands


def test_the_workspace_names_the_service_of_the_compose_file():
    workspace = yaml.safe_load((DEPLOY / "workspace.yaml").read_text("utf-8"))
    (location,) = workspace["load_from"]
    assert location["grpc_server"]["host"] in COMPOSE["services"]
    assert location["grpc_server"]["location_name"] == "replay_pipeline"
    assert str(location["grpc_server"]["port"]) in COMPOSE["services"]["code"]["command"][-1]


def test_only_the_proxy_reaches_the_webserver_and_asks_who_it_is():
    services = COMPOSE["services"]
    assert [name for name, each in services.items() if "ports" in each] == ["proxy"]
    assert all(port.startswith("127.0.0.1:") for port in services["proxy"]["ports"])
    assert services["proxy"]["networks"] == ["front"]
    in_front = [name for name, each in services.items() if "front" in each.get("networks", [])]
    assert in_front == ["webserver", "proxy"]
    assert HELM["dagsterWebserver"]["service"]["type"] == "ClusterIP"
    assert "ingress" not in HELM
    caddyfile = (DEPLOY / "proxy" / "Caddyfile").read_text("utf-8")
    assert "basic_auth" in caddyfile
    assert f"reverse_proxy webserver:{services['webserver']['command'][4]}" in caddyfile


def test_pods_with_keys_are_behind_a_policy_that_opens_no_door_and_few_ways_out():
    text = (DEPLOY / "kubernetes" / "network-policy.yaml").read_text("utf-8")
    by_name = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(text)}
    labels = JOB["metadata"]["labels"]
    assert by_name["replay-pipeline"]["podSelector"]["matchLabels"].items() <= labels.items()
    for name, spec in by_name.items():
        if name != "dagster-webserver":
            assert spec["policyTypes"] == ["Ingress", "Egress"], name
            ports = {port["port"] for rule in spec["egress"] for port in rule["ports"]}
            assert ports == {53, 443, 5432}, name
    assert by_name["replay-pipeline"]["ingress"] == by_name["replay-pipeline-runs"]["ingress"] == []


def test_one_supervisor_is_the_first_process_of_every_container_that_buys():
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    assert json.loads(entry) == ["python", "-P", "-m", "replay_pipeline.assets.supervise"]
    assert "entrypoint" not in COMPOSE["services"]["code"]
    (container,) = JOB["spec"]["containers"]
    assert "command" not in container
    assert container["args"][:2] == ["replay-pipeline", "run"]


def test_no_module_is_looked_for_in_the_folder_a_container_starts_in():
    assert re.search(r"PYTHONSAFEPATH=1", CONTAINERFILE)
    served = [CONTAINERFILE, COMPOSE["services"]["code"]["command"][-1]]
    served.append(str(HELM["dagster-user-deployments"]["deployments"][0]["dagsterApiGrpcArgs"]))
    assert all("--working-directory" in text for text in served)


def test_every_service_can_be_started_as_a_process(tmp_path):
    ports = {name: 50000 + n for n, name in enumerate(run.PORTS)}
    values = {"POSTGRES_PASSWORD": "secret", "UI_USER": "me", "UI_PASSWORD_HASH": "hash"}
    described = run.read_compose(values | {"CLAUDE_DIR": str(tmp_path)})
    place = run.Place(tmp_path / "root", ports)
    run.make_volumes(described, place)
    services = run.read_services(described, place)
    assert {each.name for each in services} == COMPOSE["services"].keys()
    started = set()
    for each in services:
        assert started >= set(each.needs)
        started.add(each.name)
        words = [*each.command, *each.health_command]
        words += [value for name, value in each.environment.items() if name != "PATH"]
        assert not re.search(r"\$\{|0\.0\.0\.0|None", " ".join(words))
        for path in re.findall(r"(?<![\w:/.])/[a-z]+\b[^ :]*", " ".join(words)):
            assert path.startswith((str(place.root), sys.prefix)), (each.name, path)
    code = next(each for each in services if each.name == "code")
    assert code.command[:4] == ["python", "-P", "-m", "replay_pipeline.assets.supervise"]
    assert "--host 127.0.0.1 --port 50001 " in code.command[-1]
    assert code.health_command[-1] == "50001"
    assert code.environment["REPLAY_LEDGER"] == "postgresql://replay:secret@127.0.0.1:50000/replay"
    assert code.environment["OPENROUTER_API_KEY"] == ""
    assert code.grace_s == 300
    workspace = yaml.safe_load((place.root / "etc/replay/workspace.yaml").read_text("utf-8"))
    assert workspace["load_from"][0]["grpc_server"]["port"] == 50001
