"""Start what `deploy/compose.yaml` describes as plain processes, use it, stop it: `make run-deploy`.

For machines without a container engine. Commands, environment, order, health checks and grace periods
are read from the compose file, entry point and variables of the image from the Containerfile. Folders
of the containers are in one temporary folder, names and ports of services are ports of loopback. Keys
are empty, so nothing can be bought. `--dry-run` only prints what would be started.
"""

import base64
import graphlib
import http.client
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replay_pipeline.storage.processes import child_environment
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.support.dagster_web import graphql, is_serving, launch_batch, use_password, wait_for_run
from tests.support.ports import free_port

DEPLOY = Path(__file__).parents[1] / "deploy"
PORTS = {"db": 5432, "code": 4000, "webserver": 3000, "proxy": 3000}
FOLDERS = "config|data|etc|sessions|srv|tmp|var"
"""Beside the program these are all that the containers read or write."""
PATIENCE_S = 120.0
POSTGRES = "postgres -p 5432 -D /var/lib/postgresql/data -c listen_addresses=127.0.0.1 -c unix_socket_directories="
CADDY = "caddy run --config /etc/caddy/Caddyfile --adapter caddyfile"
LOCATIONS = """{ workspaceOrError { ... on Workspace { locationEntries {
  name loadStatus locationOrLoadError { __typename ... on PythonError { message } } } } } }"""
START_SENSOR = """mutation($sensor: SensorSelector!) {
  startSensor(sensorSelector: $sensor) { __typename ... on PythonError { message } } }"""
BATCHES = """{ assetNodeOrError(assetKey: {path: ["trace_states"]}) {
  ... on AssetNode { partitionKeys } } }"""
REFUSED = [
    (401, "GET", "/", {"Authorization": ""}),
    (421, "GET", "/", {"Host": "elsewhere"}),
    (403, "GET", "/", {"Origin": "http://elsewhere"}),
    (403, "GET", "/", {"Sec-Fetch-Site": "cross-site"}),
    (405, "GET", "/graphql?query=%7Bversion%7D", {}),
    (403, "POST", "/graphql", {"Content-Type": "text/plain"}),
    (403, "POST", "/graphql", {"Content-Type": "application/json"}),
]
"""What the proxy answers, even to one who knows the password."""


@dataclass(frozen=True)
class Place:
    """Where on this machine the things of the compose file are."""

    root: Path
    ports: dict[str, int]

    def translate(self, text: str, name: str) -> str:
        """Return a text of service `name` with the paths, hosts and ports of this machine."""
        text = re.sub(rf"(?<![\w./:$])/({FOLDERS})(?![\w.])", rf"{self.root}/\1", text)
        text = text.replace("/opt/venv", sys.prefix).replace("0.0.0.0", "127.0.0.1")
        hosts = "|".join(self.ports)
        text = re.sub(rf"\b({hosts}):\d+", lambda m: f"127.0.0.1:{self.ports[m[1]]}", text)
        return re.sub(rf"\b{PORTS.get(name)}\b", str(self.ports.get(name)), text)


@dataclass(kw_only=True)
class Service:
    name: str
    needs: list[str]
    command: list[str]
    environment: dict[str, str]
    health_command: list[str]
    health_timeout_s: float
    start_s: float
    """How long it may take until it is healthy."""
    grace_s: float

    def options(self, root: Path) -> dict[str, Any]:
        """Return what its processes have in common. PostgreSQL refuses to run as root."""
        user = "postgres" if self.name == "db" and os.geteuid() == 0 else None
        return {"env": self.environment, "cwd": root / "srv", "user": user}


def read_compose(values: dict[str, str]) -> dict[str, Any]:
    """Return the services by name, with variables filled in as `docker compose` does."""

    def value(found: re.Match[str]) -> str:
        name, kind, word = found.groups()
        if kind == ":?" and not values.get(name):
            sys.exit(f"compose.yaml: {name}: {word}")
        return values.get(name) or (word if kind == ":-" else "")

    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    return yaml.safe_load(re.sub(r"\$\{(\w+)(?:(:[?-])([^}]*))?\}", value, text))["services"]


def read_image() -> tuple[list[str], dict[str, str]]:
    """Return the entry point and the variables of the Containerfile's last stage."""
    text = (DEPLOY / "Containerfile").read_text("utf-8").replace("\\\n", " ")
    stage = text[text.rindex("\nFROM ") :]
    (entry_point,) = re.findall(r"^ENTRYPOINT (\[.*\])$", stage, re.MULTILINE)
    pairs = shlex.split(" ".join(re.findall(r"^ENV (.*)$", stage, re.MULTILINE)))
    return json.loads(entry_point), dict(pair.split("=", 1) for pair in pairs)


def read_services(described: dict[str, Any], place: Place) -> list[Service]:
    """Return the services in the order in which they start."""
    debian = [str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]]
    variables = {"PATH": ":".join([*debian, "$PATH"]), "PGHOST": "127.0.0.1", "PGPORT": "5432"}
    images = {
        "db": (POSTGRES.split(), variables),
        "proxy": (CADDY.split(), {"XDG_CONFIG_HOME": "/config", "XDG_DATA_HOME": "/data"}),
    }
    services, path = [], child_environment()["PATH"]
    needs = {name: list(each.get("depends_on", ())) for name, each in described.items()}
    for name in graphlib.TopologicalSorter(needs).static_order():
        given = described[name]
        command, variables = read_image() if "build" in given else images[name]
        variables = {"PATH": "$PATH", "TMPDIR": "/tmp"} | variables | given.get("environment", {})
        health = given.get("healthcheck", {"test": ["CMD", "true"]})
        kind, *test = health["test"]
        test = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
        start_s = seconds(health.get("start_period", "0s"))
        services.append(
            Service(
                name=name,
                needs=needs[name],
                command=[place.translate(t, name) for t in command + given.get("command", [])],
                environment={
                    key: place.translate(str(value or ""), name).replace("$PATH", path)
                    for key, value in variables.items()
                },
                health_command=[place.translate(part, name) for part in test],
                health_timeout_s=seconds(health.get("timeout", "30s")),
                start_s=start_s + health.get("retries", 3) * seconds(health.get("interval", "30s")),
                grace_s=seconds(given.get("stop_grace_period", "10s")),
            )
        )
    return services


def seconds(text: str) -> float:
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


def make_volumes(described: dict[str, Any], place: Place) -> None:
    """Make each volume a folder, and a translated copy of each file that is mounted."""
    for name, service in described.items():
        for volume in service.get("volumes", ()):
            source, target = volume.removesuffix(":ro").split(":")
            there = place.root / target.lstrip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            if source.startswith("/"):
                there.symlink_to(source)
            elif not source.startswith("./"):
                there.mkdir(exist_ok=True)
            elif source.endswith("workspace.yaml"):
                workspace = yaml.safe_load((DEPLOY / source).read_text("utf-8"))
                for server in (each["grpc_server"] for each in workspace["load_from"]):
                    server |= {"port": place.ports[server["host"]], "host": "127.0.0.1"}
                there.write_text(yaml.safe_dump(workspace), "utf-8")
            else:
                there.write_text(
                    place.translate((DEPLOY / source).read_text("utf-8"), name), "utf-8"
                )
    for folder in ("srv", "tmp"):
        (place.root / folder).mkdir(mode=0o777, exist_ok=True)


def make_database(service: Service, place: Place) -> None:
    """Do what PostgreSQL's image does before its first start."""
    options, data = service.options(place.root), place.root / "var/lib/postgresql/data"
    if options["user"]:
        shutil.chown(data, options["user"])
    script = f"""initdb -D {data} -U $POSTGRES_USER -A scram-sha-256 --pwfile <(echo $POSTGRES_PASSWORD) &&
        echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D {data} postgres"""
    log = (place.root / "initdb.log").open("wb")
    subprocess.run(["bash", "-c", script], **options, check=True, stdout=log, stderr=log)


def run(services: list[Service], place: Place, use: Callable[[], None]) -> int:
    """Start each when what it needs is healthy, use all, stop all; returns how much went wrong."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    n_wrong = 0
    try:
        for service in services:
            with (place.root / f"{service.name}.log").open("wb") as log:
                running[service.name] = subprocess.Popen(
                    service.command,
                    **service.options(place.root),
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            # One after the other is an order that depends_on allows.
            wait_until_healthy(service, running[service.name], place)
        use()
    except (OSError, AssertionError, subprocess.SubprocessError) as error:
        print(f"FAILED: {error}")
        n_wrong += 1
        for name in running:
            lines = (place.root / f"{name}.log").read_text("utf-8", "replace").splitlines()
            print(*(f"  {name}: {line}" for line in lines[-15:]), sep="\n")
    finally:
        for service in reversed(services):
            if service.name in running:
                n_wrong += stop(service, running[service.name])
    return n_wrong


def wait_until_healthy(service: Service, process: subprocess.Popen[bytes], place: Place) -> None:
    began = time.monotonic()
    is_healthy = False
    while not is_healthy:
        assert process.poll() is None, f"{service.name} ended with {process.returncode}"
        assert time.monotonic() - began < service.start_s, f"{service.name} is not healthy"
        options = {**service.options(place.root), "timeout": service.health_timeout_s}
        done = subprocess.run(service.health_command, **options, capture_output=True)
        is_healthy = done.returncode == 0
        time.sleep(0 if is_healthy else 0.5)
    print(f"{service.name}: healthy after {time.monotonic() - began:.1f} s", flush=True)


def stop(service: Service, process: subprocess.Popen[bytes]) -> bool:
    """Stop as `docker compose stop` does; returns whether it was killed or ended badly."""
    # PostgreSQL's image says SIGINT: at SIGTERM it would wait for its clients.
    number = signal.SIGINT if service.name == "db" else signal.SIGTERM
    began = time.monotonic()
    process.send_signal(number)
    try:
        code = process.wait(service.grace_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    print(f"{service.name}: exit code {code}, {time.monotonic() - began:.1f} s after {number.name}")
    return code not in (0, 128 + number)


def use_pages(address: str, user: str, password: str) -> None:
    """Find the sessions of the volume, and make states of them: what asks no teacher."""
    url = f"http://{address}"
    use_password(url, user, password)
    wait_for("the web server", lambda: is_serving(url))
    check_proxy(address, user, password)
    (location,) = graphql(url, LOCATIONS)["workspaceOrError"]["locationEntries"]
    assert location["locationOrLoadError"]["__typename"] == "RepositoryLocation", location
    print(f"webserver: code location {location['name']} is {location['loadStatus']}")
    sensor = {"repositoryLocationName": location["name"], "repositoryName": "__repository__"}
    started = graphql(url, START_SENSOR, sensor={**sensor, "sensorName": "new_sessions"})
    assert started["startSensor"]["__typename"] == "Sensor", started
    batch, *_ = wait_for(
        "a batch", lambda: graphql(url, BATCHES)["assetNodeOrError"]["partitionKeys"]
    )
    print(f"daemon: its sensor found batch {batch}", flush=True)
    status = wait_for_run(url, launch_batch(url, batch, ["trace_states"]))
    print(f"code: the run that makes its states ended with {status}", flush=True)
    assert status == "SUCCESS"


def check_proxy(address: str, user: str, password: str) -> None:
    login = base64.b64encode(f"{user}:{password}".encode()).decode()
    for status, method, path, headers in REFUSED:
        connection = http.client.HTTPConnection(address, timeout=10)
        given = {"Authorization": f"Basic {login}"} | headers
        connection.request(method, path, b"{}" if method == "POST" else None, given)
        answer = connection.getresponse()
        assert answer.status == status, (method, path, headers, answer.status)
        connection.close()
    print(f"proxy: refused {len(REFUSED)} requests of strangers and strange pages")


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < end, f"{what}: not there after {PATIENCE_S:g} s"
        time.sleep(0.5)
    return found


def main(*arguments: str) -> int:
    with tempfile.TemporaryDirectory(prefix="deploy-") as name:
        place = Place(Path(name), {each: free_port() for each in PORTS})
        place.root.chmod(0o711)  # the user of the database passes through
        address = f"127.0.0.1:{place.ports['proxy']}"
        values = {
            "POSTGRES_PASSWORD": secrets.token_hex(16),
            "UI_USER": "me",
            "UI_PASSWORD_HASH": "hash",
            "UI_ADDRESS": address,
            "CLAUDE_DIR": f"{name}/claude",
        }
        if "--dry-run" in arguments:
            services = read_services(read_compose(values), place)
            print(*(json.dumps(vars(service)) for service in services), sep="\n")
            return 0
        print(
            "not applied: read_only, users, capabilities, networks; another PostgreSQL and Python"
        )
        password = secrets.token_hex(16)
        hashed = ["caddy", "hash-password", "--plaintext", password]
        values["UI_PASSWORD_HASH"] = subprocess.check_output(hashed, text=True).strip()
        described = read_compose(values)
        services = read_services(described, place)
        shutil.copytree(SESSIONS_DIR, place.root / "claude/projects")
        for path in (place.root / "claude").rglob("*"):
            os.utime(path, (0, 0))  # nobody writes there any more
        make_volumes(described, place)
        make_database(services[0], place)
        n_wrong = run(services, place, lambda: use_pages(address, "me", password))
    print("FAILED" if n_wrong else "ok")
    return int(n_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
