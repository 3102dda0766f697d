"""Work of older code is found and done again, and nothing is paid twice."""

import ast
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import replay_pipeline
from replay_pipeline.errors import CheckFailedError
from replay_pipeline.ingesters import read_manifest
from replay_pipeline.processes import child_environment
from replay_pipeline.replay import RECOMMENDED_GATES
from replay_pipeline.settings import ReplaySettings, Settings, WorkspaceSettings
from replay_pipeline.stages import versions
from replay_pipeline.stages.chain import STAGES
from replay_pipeline.stages.pairs import PAIRS
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.receipts import Receipts
from replay_pipeline.stages.replay import REPLAY
from replay_pipeline.stages.sample import SAMPLE
from replay_pipeline.stages.versions import PARTS, versions_of
from tests.roots import PROJECT, pipeline_at, project_root, run_batches
from tests.support.forked import forked
from tests.support.settings_files import write_settings

PACKAGE = Path(replay_pipeline.__file__).parent

CARRIES = {
    *(
        "errors",
        "lazy",
        "settings",
        "types",
        "processes",
        "trust",
        "storage",
        "ingesters.batches",
    ),
    *(
        "ingesters.__init__",
        "ingesters.json_lines",
        "redaction.printable",
        *("replay.ask.asking", "replay.money.calls", "replay.buy.lanes"),
        "replay.dialects.prices",
        "replay.dialects.sizes",
        "replay.__init__",
    ),
    *("harness.record", "stages.project", "stages.receipts", "stages.workspaces"),
    # They decide where actions are tried, and then their rules are part of the version.
    *("redaction.people", "redaction.redactor"),
}
"""Modules that carry rows from stage to stage, and decide nothing that is in them."""

FIRST_TOKEN = '[[token]]\nkind = "github-token"\nliterals = ["ghp_"'


def token_rule(kind: str, literal: str, body: str) -> str:
    return f"[[token]]\nkind = '{kind}'\nliterals = ['{literal}']\nbody = '{body}'\n\n"


CHANGES = {
    "system prompt": (
        [("harness/neutral.py", "You are a coding agent on", "You are an agent that codes on")],
        {stage: ["prompts"] for stage in ("replay", "pairs", "normalize")},
        {"replay", "pairs", "normalize"},
    ),
    "tool catalogue": (
        [("ingesters/known_tools.toml", "Run a command in a shell", "Run one command in a shell")],
        {
            "ingest": ["session readers"],
            **{stage: ["prompts"] for stage in ("replay", "pairs", "normalize")},
        },
        {"ingest", "replay", "pairs", "normalize"},
    ),
    "way of asking": (
        [("replay/dialects/requests.py", 'CATALOGUE_VERSION = "1"', 'CATALOGUE_VERSION = "2"')],
        {"replay": ["requests"]},
        {"replay", "pairs"},
    ),
    "matcher rule": (
        [("actions/agreement.py", 'return "target" if is_on_same else "tool"', 'return "effect"')],
        {"pairs": ["matcher"], "normalize": ["matcher"]},
        {"pairs", "normalize"},
    ),
    "secret rule": (
        [("redaction/secret_rules.toml", FIRST_TOKEN, f"{token_rule('ship', 'strft', 'ime')}\\g")],
        {"ingest": ["secret rules"], "normalize": ["secret rules"]},
        {"ingest", "replay", "pairs", "normalize"},
    ),
    "secret rule that finds nothing": (
        [("redaction/secret_rules.toml", FIRST_TOKEN, f"{token_rule('x', 'qqqq', 'zzz')}\\g")],
        {"ingest": ["secret rules"], "normalize": ["secret rules"]},
        {"ingest", "normalize"},
    ),
    "label rule": (
        [
            (
                "ingesters/labels.py",
                'return "tool_error", _kind_of(text)',
                'return "tool_error", "x"',
            )
        ],
        {"ingest": ["session readers"]},
        {"ingest", "replay", "pairs", "normalize"},
    ),
    "normalize kernel": (
        [("normalize/kernels.py", "np.maximum(self.n_chars, 1)", "np.maximum(self.n_chars, 2)")],
        {"normalize": ["normalizer"]},
        {"normalize"},
    ),
}
"""By what was changed: the edits, the reasons that `status --stale` gives, the stages that run."""

ASKS_ANEW = {"system prompt", "tool catalogue", "way of asking", "secret rule"}

AGAIN = """
import json, sys
from pathlib import Path
from replay_pipeline.errors import CheckFailedError
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline

work = Pipeline(Settings.load(data_dir=Path(sys.argv[1])))
stale = work.stale()
try:
    work.publish()
    refusal = ""
except CheckFailedError as error:
    refusal = str(error)
stages = ("ingest", "replay", "pairs", "normalize")
receipts = [getattr(work, stage)(batch) for stage in stages for batch in work.batches()]
done = [receipt for receipt in receipts if not receipt.is_reused]
again = [getattr(work, stage)(batch) for stage in stages for batch in work.batches()]
work.publish()
print(json.dumps({
    "stale": stale,
    "refusal": refusal,
    "ran": sorted({receipt.stage for receipt in done}),
    "n_sent": sum(r.report["n_sent"] for r in done if r.stage == "replay"),
    "n_cached": sum(r.report["n_cached"] for r in done if r.stage == "replay"),
    "is_settled": all(receipt.is_reused for receipt in again) and not work.stale()["batches"],
}))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A data root on one project of the sample that has come as far as its dataset."""
    root = tmp_path_factory.mktemp("versions") / "data"
    write_settings(
        root,
        ingest={"sources": [PROJECT]},
        replay={"sample_teachers": True, "gates": []},
    )
    work = pipeline_at(root)
    run_batches(work)
    work.publish()
    return root


@pytest.fixture
def root(done, tmp_path):
    return Path(shutil.copytree(done, tmp_path / "data"))


def run_changed(root: Path, code: Path, edits: list[tuple[str, str, str]]) -> dict:
    """What a copy of the package with some edits makes of a data root."""
    package = code / "replay_pipeline"
    shutil.copytree(PACKAGE, package)  # with the bytecode of what is not edited
    shutil.copytree(PACKAGE.parent / "recipes", code / "recipes")
    for name, old, new in edits:
        text = (package / name).read_text("utf-8")
        assert old in text, name
        (package / name).write_text(text.replace(old, new.replace("\\g", old), 1), "utf-8")
    finished = subprocess.run(
        forked([sys.executable, "-c", AGAIN, str(root)], "libraries"),
        env=child_environment(PYTHONPATH=str(code)),
        cwd=code,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_runs_the_stages_after_it_and_pays_for_new_questions_only(root, tmp_path, what):
    edits, reasons, stages = CHANGES[what]
    batch = pipeline_at(root).batches()[0]
    found = run_changed(root, tmp_path / "code", edits)
    of_dataset = found["stale"]["batches"].get("all", {})
    assert found["stale"]["batches"].get(batch, {}) == reasons
    shown = {
        "secret": ["secret rules"],
        "system": ["prompts"],
        "tool": ["prompts"],
        "matcher": ["matcher"],
    }
    part = shown.get(what.split()[0])
    assert of_dataset == ({"publish": part} if part else {})
    assert set(found["ran"]) == stages
    assert bool(found["refusal"]) == ("ingest" in reasons and "secret" in what)
    assert bool(found["n_sent"]) == (what in ASKS_ANEW)
    if what in {"system prompt", "way of asking"}:
        told = sum(row["n_calls"] for row in found["stale"]["cost"]["teachers"])
        assert told == found["n_sent"]
    if what == "secret rule":
        assert found["n_cached"]  # of the states before the secret
    assert found["is_settled"]


def test_a_changed_setting_is_stale_with_both_values_until_its_stage_has_run(root):
    plain = pipeline_at(root)
    batch = plain.batches()[0]
    assert plain.stale() == {"batches": {}, "cost": None}
    work = pipeline_at(root, pairs={"agreement_threshold": 3})
    changed = ["pairs.agreement_threshold: 2 → 3"]
    assert work.stale() == {"batches": {batch: {"pairs": changed}}, "cost": None}
    assert not work.pairs(batch).is_reused
    told = {"all": {"publish": [f"new rows of {batch}"]}}  # its manifest has the figures of a stage
    new_rows = [f"new rows of {table}" for table in ("dpo_pairs", "outcomes", "positives")]
    assert work.stale()["batches"] == told | {batch: {"normalize": new_rows}}
    work.normalize(batch)
    assert work.stale()["batches"] == told
    work.publish()
    assert work.stale()["batches"] == {}


def test_an_address_or_the_spelling_of_a_folder_makes_nothing_stale(root, monkeypatch):
    spelled = {"folder": root.parent / root.name / ".." / root.name / "dataset"}
    quick = [
        spec.model_dump() | {"max_concurrency": 3}
        for spec in pipeline_at(root).settings.replay.teachers
    ]
    work = pipeline_at(root, publish=spelled, replay={"teachers": quick})
    assert work.stale()["batches"] == {}
    assert work.publish().is_reused
    monkeypatch.chdir(root.parent)
    relative = Settings.load(root / "settings.toml", data_dir=Path(root.name))
    assert Pipeline(relative).stale()["batches"] == {}


def unsaid(root: Path, *stages: str) -> None:
    """Make receipts look like those of 0.1.0, which do not say by what code they were made."""
    receipts = Receipts(root)
    for receipt in receipts.all():
        if receipt.stage in stages:
            receipts.write(replace(receipt, versions={}, settings=None, inputs={}, outputs={}))


@pytest.mark.slow
def test_receipts_without_versions_are_done_again_but_replays_are_kept(root):
    unsaid(root, "ingest", "replay", "pairs", "normalize")
    work = pipeline_at(root)
    batch = work.batches()[0]
    stages = ("ingest", "normalize", "pairs", "replay")
    assert work.stale()["batches"][batch] == {stage: ["unknown"] for stage in stages}
    assert work.stale()["cost"] is None
    with pytest.raises(CheckFailedError, match="status --stale"):
        pipeline_at(root, publish={"test_fraction": 0.5}).publish()
    assert not work.ingest(batch).is_reused
    assert work.replay(batch, max_total_usd=0).is_reused
    assert not work.pairs(batch).is_reused
    assert work.normalize(batch).fingerprint
    assert work.publish().report["rows_by_split"]
    assert work.stale()["batches"] == {batch: {"replay": ["unknown"]}}


def test_what_was_read_from_logs_that_are_gone_is_redacted_again(tmp_path, monkeypatch):
    sessions = tmp_path / "sessions"
    shutil.copytree(PROJECT, sessions)
    work = project_root(tmp_path / "data")
    options = {"sources": [sessions], "keeps_bytes": False}
    work = pipeline_at(tmp_path / "data", ingest=options)
    batch = work.ingest_new()[0]
    before = {name: work.root.read(name, batch) for name in ("turns", "states")}
    shutil.rmtree(sessions)
    assert work.ingest(batch).is_reused

    receipts = Receipts(work.root.path)
    receipt = receipts.read("ingest", batch)
    assert receipt is not None
    receipts.write(replace(receipt, versions={**receipt.versions, "secret rules": "older"}))
    again = work.ingest(batch)
    assert not again.is_reused
    assert again.report["n_files_gone"] == len(read_manifest(batch, work.root.path).slices)
    assert {name: work.root.read(name, batch) for name in before} == before

    states = work.root.read("states", batch)
    place = states.column_names.index("action_text")
    told = ["the key is ghp_" + "a1B2c3" * 6] * states.num_rows
    work.root.write("states", batch, states.set_column(place, "action_text", [told]))
    receipts.write(replace(receipt, versions={**receipt.versions, "secret rules": "older"}))
    assert work.ingest(batch).report["redactions"]["github-token"] == states.num_rows
    assert not any(
        "ghp_" in text for text in work.root.read("states", batch)["action_text"].to_pylist()
    )


def test_a_version_sees_code_and_data_but_no_comment_docstring_or_layout(tmp_path, monkeypatch):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "types.py").write_text("FAILURES = ()")
    module = tmp_path / "pairs" / "one.py"
    monkeypatch.setattr(versions, "_PACKAGE", tmp_path)

    def version_with(text: str) -> str:
        versions._digest_of.cache_clear()
        module.write_text(text)
        return versions._digest_of("pairs")

    first = version_with("def f(x: int = 1) -> int:\n    return x + 1\n")
    commented = (
        '"""Why."""\n\n\ndef f(x: int=1) -> int:\n    """How."""\n    # so\n    return (x + 1)\n'
    )
    assert version_with(commented) == first
    assert version_with("def f(x: int = 1) -> int:\n    return x + 2\n") != first
    assert version_with("def f(x: int = 2) -> int:\n    return x + 1\n") != first
    (tmp_path / "pairs" / "table.toml").write_text("a = 1")
    with_data = version_with(commented)
    assert with_data != first
    (tmp_path / "pairs" / "notes.md").write_text("why")
    assert version_with(commented) == with_data
    versions._digest_of.cache_clear()


def test_a_version_sees_a_constant_that_is_shared(tmp_path, monkeypatch):
    for name in ("types.py", "replay/buy/policy.py", "replay/buy/places.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / name)
    monkeypatch.setattr(versions, "_PACKAGE", tmp_path)

    def version_with(old: str, new: str) -> str:
        versions._digest_of.cache_clear()
        text = (tmp_path / "types.py").read_text()
        assert old in text
        (tmp_path / "types.py").write_text(text.replace(old, new))
        return versions._digest_of("gates")

    first = version_with("", "")
    assert version_with("Message = dict[str, Any]", "Message = dict[str, object]") == first
    assert version_with('        "rewound",\n    )', "    )") != first
    versions._digest_of.cache_clear()


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports, by their names inside it."""
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text("utf-8"))
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    own = {n.removeprefix("replay_pipeline.") for n in names if n.startswith("replay_pipeline.")}
    return {f"{n}.__init__" if (PACKAGE / n.replace(".", "/")).is_dir() else n for n in own}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_module_that_a_stage_depends_on_is_in_its_version_or_only_carries_rows(stage):
    files = [path for part in stage.parts(Settings()) for path in versions._files_of(part)]
    modules = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in files
        if path.suffix == ".py"
    }
    reached = {name for module in modules for name in imports_of(module)}
    outside = {name for name in reached - modules if not CARRIES & {name, name.partition(".")[0]}}
    assert not outside, "name them in stages/versions.py, or here if they decide nothing"


def test_every_part_has_code_and_a_stage():
    assert all(versions._files_of(part) for part in PARTS)
    gated = Settings(replay=ReplaySettings(gates=RECOMMENDED_GATES))
    assert {part for stage in STAGES for part in stage.parts(gated)} == set(PARTS)
    everywhere = Settings(replay=ReplaySettings(gates=()))
    assert set(REPLAY.parts(gated)) - set(REPLAY.parts(everywhere)) == {"gates", "matcher"}
    trying = Settings(workspaces=WorkspaceSettings(execute="files"))
    for stage in (PAIRS, SAMPLE):
        assert set(stage.parts(trying)) - set(stage.parts(Settings())) == {"secret rules"}


def test_a_function_of_ones_own_is_a_part_of_a_version():
    def one(x: int) -> int:
        """Add one."""
        return x + 1

    first = versions_of(["pairs", one])
    assert set(first) == {"pairs", "one"}

    def one(x: int) -> int:  # in other words, and the same
        return x + 1

    assert versions_of([one])["one"] == first["one"]

    def one(x: int) -> int:
        return x + 2

    assert versions_of([one])["one"] != first["one"]
