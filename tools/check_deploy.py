"""Check the files of `deploy/` with the tools they are for: `make check-deploy [CHART=FOLDER]`.

hadolint reads the Containerfile, Caddy the proxy's file, compose-spec the compose file,
kubernetes-validate the manifests, and the Helm values go through the configuration schemas of Dagster
and of its run launcher, which is what the chart hands them to. Where Dagster's chart is at hand (`helm pull
dagster/dagster --untar`), it is rendered with them. Nothing is started and nothing is fetched.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from compose_spec import PyCompose
from dagster import DagsterInstance, Shape
from dagster._config import process_config
from dagster._core.run_coordinator import QueuedRunCoordinator
from dagster_k8s import K8sRunLauncher
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import UserDefinedDagsterK8sConfig

DEPLOY = Path(__file__).parents[1] / "deploy"


def check_containerfile() -> None:
    tool = Path(sys.executable).with_name("hadolint")
    subprocess.run([tool, DEPLOY / "Containerfile"], check=True)


def check_caddyfile() -> None:
    tool = Path(sys.executable).with_name("caddy")
    secret = subprocess.check_output([tool, "hash-password", "--plaintext", "any"], text=True)
    values = {"UI_USER": "me", "UI_PASSWORD_HASH": secret.strip(), "UI_ADDRESS": "127.0.0.1:3000"}
    command = [
        tool,
        "validate",
        "--adapter",
        "caddyfile",
        "--config",
        DEPLOY / "proxy" / "Caddyfile",
    ]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(command, env={"HOME": home, **values}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_compose() -> None:
    """Check the services as they are once the variables have values."""
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    text = re.sub(r"\$\{\w+(?::[?-]([^}]*))?\}", lambda m: m[1] or "value", text)
    PyCompose.from_json(json.dumps(yaml.safe_load(text))).to_spec()


def check_manifests() -> None:
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for resource in yaml.safe_load_all(path.read_text("utf-8")):
            kubernetes_validate.validate(resource, "1.37", strict=True)


def check_helm_values() -> None:
    values = yaml.safe_load((DEPLOY / "helm-values.yaml").read_text("utf-8"))
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    config = {
        "dagster_home": "/opt/dagster/dagster_home",
        "image_pull_policy": launcher["imagePullPolicy"],
        "instance_config_map": "dagster-instance",
        "load_incluster_config": launcher["loadInclusterConfig"],
        "postgres_password_secret": values["global"]["postgresqlSecretName"],
        "run_k8s_config": {_snake(key): value for key, value in launcher["runK8sConfig"].items()},
        "service_account_name": "dagster",
    }
    found = process_config(Shape(K8sRunLauncher.config_type()), config)
    assert found.success, found.errors
    UserDefinedDagsterK8sConfig.from_dict(found.value["run_k8s_config"])
    monitoring = values["dagsterDaemon"]["runMonitoring"]
    instance = {
        "run_monitoring": {_snake(key): value for key, value in monitoring.items()},
        "telemetry": values["telemetry"],
        "concurrency": {
            kind: {_snake(key): value for key, value in values["concurrency"][kind].items()}
            for kind in ("pools", "runs")
        },
    }
    _check_queue(instance)
    deployment: dict[str, Any] = values["dagster-user-deployments"]["deployments"][0]
    kubernetes_validate.validate(_pod_of(deployment), "1.37", strict=True)


def check_chart(chart: str) -> None:
    """Render a chart with the values, and see what runs and their queue come to."""
    tool = Path(sys.executable).with_name("helm")
    # Its schema names another one by its address.
    command = [tool, "template", "mine", chart, "--skip-schema-validation"]
    with tempfile.TemporaryDirectory() as home:
        text = subprocess.check_output(
            [*command, "--values", DEPLOY / "helm-values.yaml"], text=True, env={"HOME": home}
        )
    objects = [_without_nulls(each) for each in yaml.safe_load_all(text) if each]
    for each in objects:
        group = each["apiVersion"].rpartition("/")[0]
        if "." not in group or group.endswith(".k8s.io"):
            kubernetes_validate.validate(each, "1.37", strict=True)
    (config,) = (each for each in objects if each["metadata"]["name"] == "mine-dagster-instance")
    instance = yaml.safe_load(config["data"]["dagster.yaml"])
    on_server = ("event_log_storage", "run_launcher", "run_storage", "schedule_storage")
    _check_queue({key: value for key, value in instance.items() if key not in on_server})
    _check_runs(
        instance["run_launcher"]["config"]["run_k8s_config"],
        next(
            json.loads(variable["value"])
            for each in objects
            if each["kind"] == "Deployment"
            for variable in each["spec"]["template"]["spec"]["containers"][0].get("env", ())
            if variable["name"] == "DAGSTER_CLI_API_GRPC_CONTAINER_CONTEXT"
        ),
    )


def _check_queue(instance: dict[str, Any]) -> None:
    """Check that runs wait in Dagster's queue, and that pools take one at a time."""
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "dagster.yaml").write_text(yaml.safe_dump(instance), "utf-8")
        with DagsterInstance.from_config(home) as opened:
            assert isinstance(opened.run_coordinator, QueuedRunCoordinator), instance
            limits = opened.get_concurrency_config()
            assert limits.pool_config.default_pool_limit == 1
            assert limits.run_queue_config is not None
            assert limits.run_queue_config.max_concurrent_runs == 2


def _check_runs(of_launcher: dict[str, Any], of_location: dict[str, Any]) -> None:
    """Check what a run gets once the code location's settings are put over the launcher's."""
    launcher = K8sContainerContext(
        run_k8s_config=UserDefinedDagsterK8sConfig.from_dict(of_launcher)
    )
    merged = launcher.merge(K8sContainerContext.create_from_config(of_location)).run_k8s_config
    container, pod = dict(merged.container_config), dict(merged.pod_spec_config)
    assert container["resources"]["limits"] == {"memory": "4Gi"}
    assert container["security_context"]["allow_privilege_escalation"] is False
    assert {"secret_ref": {"name": "replay-pipeline"}} in container["env_from"]
    assert pod["security_context"]["run_as_non_root"] is True
    assert pod["termination_grace_period_seconds"] == 300
    assert {volume["name"] for volume in pod["volumes"]} == {"sessions", "home"}


def _without_nulls(value: Any) -> Any:
    """Leave out what the chart leaves empty."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _pod_of(deployment: dict[str, Any]) -> dict[str, Any]:
    """The pod that the chart makes of a user deployment."""
    image = deployment["image"]
    container = {
        "name": deployment["name"],
        "image": f"{image['repository']}:{image['tag']}",
        "imagePullPolicy": image["pullPolicy"],
        "env": deployment["env"],
        "envFrom": [{"secretRef": secret} for secret in deployment["envSecrets"]],
        "resources": deployment["resources"],
        "securityContext": deployment["securityContext"],
        "volumeMounts": deployment["volumeMounts"],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": deployment["name"]},
        "spec": {
            "containers": [container],
            "securityContext": deployment["podSecurityContext"],
            "volumes": deployment["volumes"],
        },
    }


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


if __name__ == "__main__":
    checks = (
        check_containerfile,
        check_caddyfile,
        check_compose,
        check_manifests,
        check_helm_values,
    )
    for check in checks:
        check()
        print(f"ok: {check.__name__.removeprefix('check_').replace('_', ' ')}")
    for chart in sys.argv[1:]:
        check_chart(chart)
        print(f"ok: the chart in {chart}")
