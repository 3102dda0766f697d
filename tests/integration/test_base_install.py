"""A wheel without extras reads and shows sessions, and names in one line what an extra brings.

And one with the extra of replays, and the trainer's. The environments are put together from the packages that are
installed here, which takes seconds; `make test-wheel` has pip make them, and names their folder.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import PROJECT

ROOT = Path(__file__).parents[2]
MAX_PACKAGES, MAX_BYTES = 26, 250_000_000
TINY = yaml.safe_load((ROOT / "trainer" / "tiny.yaml").read_text("utf-8"))
TWO_STEPS = yaml.safe_dump(
    TINY
    | {
        "tiny": {**TINY["tiny"], "pretraining_steps": 2},
        "evaluation": {"max_pairs": 4, "max_prompts": 2, "max_new_tokens": 8},
        "trl": {**TINY["trl"], "max_steps": 2, "max_completion_length": 24},
    }
)


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _base_packages(start: list[str]) -> dict[str, Path]:
    """Every distribution that the wheel brings without extras."""
    found: dict[str, Path] = {}
    waiting = [Requirement(line) for line in start]
    while waiting:
        wanted = waiting.pop()
        name = _name(wanted.name)
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[name] = distribution(name)
        waiting += map(Requirement, found[name].requires or ())
    return found


def _wheel(folder: Path) -> Path:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def _environment(folder: Path, wheel: Callable[[], Path], *extras: str) -> tuple[Path, int, int]:
    """A virtual environment with the wheel, the packages of the base and extras, and no other."""
    if made := os.environ.get("WHEEL_ENVIRONMENTS"):
        python = Path(made).absolute() / "-".join(["base", *extras]) / "bin" / "python"
        return python, 0, 0
    venv.create(folder / "venv", with_pip=False)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    zipfile.ZipFile(wheel()).extractall(site)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    packages = _base_packages(wanted)
    n_bytes = 0
    for package in packages.values():
        for file in package.files:
            there = Path(file.locate())
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            n_bytes += there.stat().st_size
            # A package as a whole, with what is compiled of it; a shared folder file by file.
            top = Path(file.locate()).parents[len(file.parts) - 2] if len(file.parts) > 1 else there
            is_whole = (top / "__init__.py").exists() or top.suffix == ".dist-info"
            name = file.parts[0] if is_whole else str(file)
            here = site / name
            here.parent.mkdir(parents=True, exist_ok=True)
            if not here.is_symlink():
                here.symlink_to(top if is_whole else there)
    return folder / "venv" / "bin" / "python", len(packages), n_bytes


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    """Give the environment of some extras, and how many packages and bytes it has; made once."""
    wheel = cache(lambda: _wheel(tmp_path_factory.mktemp("dist")))
    return cache(lambda *extras: _environment(tmp_path_factory.mktemp("venv"), wheel, *extras))


@pytest.fixture
def command(environments, tmp_path):
    """Run a command where the extra of replays is."""
    return _commands(environments("replay")[0], tmp_path)


def _commands(python: Path, tmp_path: Path):
    def run(*arguments, rc=0):
        done = subprocess.run(
            [python, "-m", "replay_pipeline.cli", *map(str, arguments)],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={
                "HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "REPLAY_TEACHERS": "sample",
                "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                "KF_RULE_CACHE_DIR": os.environ["KF_RULE_CACHE_DIR"],
            },
        )  # fmt: skip
        assert done.returncode == rc, done.stdout + done.stderr
        return done

    return run


def test_the_base_is_small(environments):
    _, n_packages, n_bytes = environments()
    assert n_packages <= MAX_PACKAGES
    assert n_bytes <= MAX_BYTES


@pytest.mark.slow
def test_the_commands_take_sessions_to_a_dataset_folder(command, tmp_path):
    data = ("--data", "root")
    sessions = sorted(PROJECT.glob("*.jsonl"))
    (tmp_path / "none.toml").write_text("[normalize]\nrecipe = 'none'\n")
    command("run", *sessions[:3], "--settings", "none.toml", "--no-train", *data)
    assert "`none`" in (tmp_path / "root" / "dataset" / "README.md").read_text()
    assert list((tmp_path / "root" / "dataset").rglob("*.parquet"))
    command("estimate", *data)
    assert "--recipe none" in command("normalize", *data, rc=2).stderr
    doctor = command("doctor", *data, rc=1)
    assert "replay-pipeline[dagster]" in doctor.stdout.replace("\n", "")


@pytest.mark.slow
def test_the_base_reads_sessions_and_its_page_has_its_libraries_and_their_licenses(
    environments, tmp_path
):
    base_command = _commands(environments()[0], tmp_path)
    sessions = sorted(PROJECT.glob("*.jsonl"))[:1]
    base_command("ingest", *sessions, "--data", "root")
    error = base_command("estimate", "--data", "root", rc=2).stderr
    assert "pip install 'replay-pipeline[replay]'" in error
    base_command("look", *sessions, "--to", "page")
    web = ROOT / "replay_pipeline/stages/pages/web"
    licenses = {"markdown-it.umd": "MIT", "purify": "Apache License"}
    for library, license_name in licenses.items():
        for name in (f"{library}.min.js", f"{library.removesuffix('.umd')}.LICENSE.md"):
            assert (tmp_path / "page" / name).read_bytes() == (web / name).read_bytes()
        assert license_name in (tmp_path / "page" / name).read_text("utf-8")
    assert sorted(path.name for path in web.glob("*.min.js")) == [
        f"{each}.min.js" for each in licenses
    ]


@pytest.mark.slow
def test_with_the_trainer_alone_the_commands_go_as_far_as_a_model(environments, tmp_path):
    command = _commands(environments("replay", "train")[0], tmp_path)
    data = ("--data", "root")
    sessions = sorted(PROJECT.glob("*.jsonl"))
    (tmp_path / "mine.toml").write_text("[normalize]\nrecipe = 'none'\n")
    chosen = ("--settings", "mine.toml", "--teachers", "rehearsal", "--no-train")
    command("run", *sessions[:3], *chosen, *data)
    (tmp_path / "two.yaml").write_text(TWO_STEPS)
    report = json.loads(command("train", "--config", "two.yaml", *data, "--json").stdout)
    assert report["steps"] == 2
    missing = command("ui", *data, rc=2).stderr
    assert "replay-pipeline[dagster]" in missing
    doctor = json.loads(command("doctor", *data, "--json", rc=1).stdout)["findings"]
    found = {finding["what"]: finding["ok"] for finding in doctor}
    assert found["trl"]
    assert not found["dagster"]
    assert not found["data_juicer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["demo"], "dagster"),
        (["train", "--data", "root"], "train"),
        (["run", SESSIONS_DIR, "--data", "root"], "normalize,train"),
        (["run", SESSIONS_DIR, "--data", "root", "--no-train"], "normalize"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(command, arguments, extra):
    lines = command(*arguments, rc=2).stderr.strip().splitlines()
    assert len(lines) == 1
    assert f"pip install 'replay-pipeline[{extra}]'" in lines[0]


@pytest.mark.slow
def test_the_trainer_names_its_extra_where_it_is_missing(environments, tmp_path):
    done = subprocess.run(
        [environments()[0], "-m", "trainer", "--set", "dataset=there"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install 'replay-pipeline[train]'" in line
