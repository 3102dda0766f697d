"""A wheel without extras: its commands work, and what an extra brings is named in one line."""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from replay_pipeline.testing.sample import SESSIONS_DIR

ROOT = Path(__file__).parents[2]
MAX_PACKAGES, MAX_BYTES = 50, 560_000_000


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


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A virtual environment with the wheel and the packages of the base, and no other."""
    folder = tmp_path_factory.mktemp("base")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    venv.create(folder / "venv", with_pip=False)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    (wheel,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = _base_packages(wanted)
    n_bytes = 0
    for package in packages.values():
        for file in package.files:
            there, here = Path(file.locate()), site / file
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            here.parent.mkdir(parents=True, exist_ok=True)
            here.symlink_to(there)
            n_bytes += there.stat().st_size
    return folder / "venv" / "bin" / "python", len(packages), n_bytes


@pytest.fixture
def command(base, tmp_path):
    def run(*arguments, rc=0):
        done = subprocess.run(
            [base[0], "-m", "replay_pipeline.cli", *map(str, arguments)],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "REPLAY_TEACHERS": "sample"},
        )  # fmt: skip
        assert done.returncode == rc, done.stdout + done.stderr
        return done

    return run


def test_the_base_is_small(base):
    _, n_packages, n_bytes = base
    assert n_packages <= MAX_PACKAGES
    assert n_bytes <= MAX_BYTES


@pytest.mark.slow
def test_the_commands_of_the_base_take_sessions_to_a_dataset_folder(command, tmp_path):
    data = ("--data", "root")
    assert command("--version").stdout.strip()
    sessions = sorted((SESSIONS_DIR / "-home-mira-code-tideline").glob("*.jsonl"))
    command("ingest", *sessions[:3], *data)
    command("estimate", *data)
    replayed = json.loads(command("replay", *data, "--json").stdout)
    assert all(report["n_answers"] for report in replayed.values())
    command("pairs", *data)
    command("review", *data)
    assert "--recipe none" in command("normalize", *data, rc=2).stderr
    command("normalize", "--recipe", "none", *data)
    command("publish", "--to", "dataset", *data)
    assert "`none`" in (tmp_path / "dataset" / "README.md").read_text()
    assert list((tmp_path / "dataset").rglob("*.parquet"))
    doctor = command("doctor", *data, rc=1)
    assert "replay-pipeline[dagster]" in doctor.stdout.replace("\n", "")


@pytest.mark.slow
def test_the_demo_shows_pairs_before_anything_but_the_base_is_installed(command, tmp_path):
    shown = command("demo", "--until-pairs").stdout
    assert "Pairs to look at first" in shown
    assert (tmp_path / "demo" / "review.html").exists()


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["demo"], "dagster"),
        (["ui", "--data", "root"], "dagster"),
        (["sync", "--data", "root"], "dagster"),
        (["train", "--data", "root"], "train"),
        (["run", SESSIONS_DIR, "--data", "root"], "normalize"),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(command, arguments, extra):
    lines = command(*arguments, rc=2).stderr.strip().splitlines()
    assert len(lines) == 1
    assert f"pip install 'replay-pipeline[{extra}]'" in lines[0]
