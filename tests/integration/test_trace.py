"""`replay-pipeline trace`: the life of one state, as the stages have it."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from replay_pipeline.cli import app
from replay_pipeline.settings import DEFAULT_TEACHERS
from replay_pipeline.testing.sample import SESSIONS_DIR
from tests.roots import pipeline_at, project_root, run_batches, sample_root
from tests.support.looking import call
from tests.support.settings_files import write_settings
from tests.support.teachers import TeacherServer
from tests.support.worked import Worked
from trainer.errors import DatasetError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    work = project_root(tmp_path_factory.mktemp("trace") / "data", ask_at="consequences")
    run_batches(work)
    work.publish()
    return work.root.path


def traced(root: Path, state: str, *more: str) -> str:
    done = CliRunner().invoke(app, ["trace", state, "--data", str(root), *more])
    assert done.exit_code == 0, done.output
    return done.stdout


def a_pair(root: Path) -> dict:
    work = pipeline_at(root)
    rows = work.root.read("dpo_pairs", work.batches()[0]).to_pylist()
    return next(row for row in rows if row["source"] == "consensus")


def test_a_state_is_followed_from_its_log_to_its_tokens(root):
    pair = a_pair(root)
    life = json.loads(traced(root, pair["state_id"], "--json"))
    assert life["state_id"] == pair["state_id"]

    action = life["ingest"]["states"][0]
    rows = life["ingest"]["log rows"]
    assert rows
    for found in rows:
        ((where, text),) = found.items()
        name, _, number = where.rpartition(":")
        (log,) = SESSIONS_DIR.rglob(name)
        assert json.loads(text)["type"] == "assistant"
        written = json.loads(log.read_text("utf-8").splitlines()[int(number) - 1])
        assert json.loads(text)["message"]["id"] == written["message"]["id"]
    assert life["ingest"]["turns"][0]["turn_idx"] == action["turn_idx"]

    answers = {row["teacher"]: row for row in life["replay"]["teacher_actions"]}
    assert len(answers) == 3
    for teacher, answer in answers.items():
        sent = life["replay"][f"prompt for {teacher}"]
        assert sent["request_sha"] == answer["request_sha"]
        assert sent["body"]["messages"][0]["role"] == "system"

    votes = life["pairs"]["votes"]
    assert votes["the agent itself"]["action"] == pair["rejected"]
    assert {votes[teacher]["action"] for teacher in pair["teachers_agreeing"]} >= {pair["chosen"]}
    assert life["pairs"]["outcomes"][0]["outcome"] == "pair"
    assert life["pairs"]["dpo_pairs"][0]["pair_id"] == pair["pair_id"]
    assert life["normalize"]["normalized_pairs"][0]["chosen"] == pair["chosen"]
    (published,) = {
        row["prompt"][0]["content"]
        for name, rows in life["publish"].items()
        if name.startswith("pairs/")
        for row in rows
    }
    assert published.startswith("You are a coding agent")

    (tokens,) = life["train"]["tokens"]
    scored = [tokens[f"{side} (scored)"] for side in ("chosen", "rejected")]
    assert scored[0]["token_ids"] != scored[1]["token_ids"]
    for side in (tokens["prompt (read, not scored)"], *scored):
        assert len(side["token_ids"]) == side["n_tokens"] > 0


def test_a_held_out_state_says_so_instead_of_its_tokens(root):
    (shard,) = sorted((root / "dataset/data/pairs/test").rglob("*.parquet"))[:1]
    (state,) = pq.read_table(shard, columns=["state_id"])["state_id"].to_pylist()[:1]
    life = json.loads(traced(root, state, "--json"))
    assert life["publish"]["pairs/test"]
    assert life["train"]["tokens"] == "none: the state is held out (split test)"


def test_the_trainer_says_that_all_is_held_out(root, tmp_path):
    shutil.copytree(root / "dataset", tmp_path / "dataset")
    card = tmp_path / "dataset/README.md"
    for name in ("pairs", "positives", "answers"):
        shutil.rmtree(tmp_path / f"dataset/data/{name}/train")
        train = f"  - split: train\n    path: data/{name}/train/**/*.parquet\n"
        card.write_text(card.read_text("utf-8").replace(train, ""), "utf-8")
    from trainer.data.dataset import load_preference_data  # `datasets` comes with it

    with pytest.raises(DatasetError, match="no train split, so all rows are held out"):
        load_preference_data(tmp_path / "dataset")


def test_a_dataset_that_was_published_elsewhere_is_found_there(root, tmp_path):
    shutil.copytree(root, tmp_path / "data")
    run = CliRunner().invoke
    for words in (["publish", "--to", str(tmp_path / "ds")], ["publish"], ["verify"]):
        shutil.rmtree(tmp_path / "data/dataset", ignore_errors=True)
        done = run(app, [*words, "--data", str(tmp_path / "data")])
        assert done.exit_code == 0, done.output
    assert not (tmp_path / "data/dataset").exists()
    state = a_pair(root)["state_id"]
    assert json.loads(traced(tmp_path / "data", state, "--json"))["publish"]


def test_a_state_is_followed_without_its_log_and_as_far_as_it_has_come(root, tmp_path):
    shutil.copytree(SESSIONS_DIR, tmp_path / "logs")
    options = {"sources": [tmp_path / "logs"], "max_batch_sessions": 8}
    work = pipeline_at(
        tmp_path / "data", ingest=options, replay={"sample_teachers": True, "ask_at": "steps"}
    )
    batch = work.ingest_new()[0]
    shutil.rmtree(tmp_path / "logs")
    state = work.root.read("states", batch)["state_id"][0].as_py()
    shown = traced(tmp_path / "data", state)
    assert "log rows:" in shown
    assert ".jsonl:" in shown
    assert "teacher_actions" not in shown


def test_a_state_that_is_not_there_or_not_alone_is_refused(root):
    for beginning, n in (("cc1_zzzzzzzz", 0), ("cc1_", len(pipeline_at(root).batches()))):
        done = CliRunner().invoke(app, ["trace", beginning, "--data", str(root)])
        told = f"ids that begin with '{beginning}'" if n else "no state has an id that begins with"
        assert told in str(done.exception)


def test_a_lesson_that_needs_a_look_is_trained_on_with_that_look_read_and_the_action_scored(
    tmp_path,
):
    """The teachers read a file that the agent never opened, and edit it: published, and in tokens."""
    work = Worked(tmp_path / "tides")
    work.begin({"high.py": "HIGH = 3\n", "low.py": "LOW = 1\n"})
    work.session.user("High water is 4 and low water is 2: mend high.py and low.py.")
    work.read("high.py")
    work.edit("high.py", "HIGH = 3", "HIGH = 4")
    log, root = work.session.write(tmp_path / "projects"), tmp_path / "data"
    pipeline = sample_root(root, sessions=log, ask_at="consequences")
    [batch] = pipeline.ingest_new()
    [state] = pipeline.asked_states([batch])
    low = f"{state['cwd']}/low.py"
    look = call("Read", file_path=low)
    edit = call("Edit", file_path=low, old_string="LOW = 1", new_string="LOW = 2")
    names = [spec.model for spec in DEFAULT_TEACHERS]
    answers = {
        state["state_id"]: dict.fromkeys(names, look),
        f"{state['state_id']}+1": dict.fromkeys(names, edit),
    }
    with TeacherServer(answers) as server:
        asked = {"teachers": server.teachers(), "ask_at": "consequences", "looks_share": 1.0}
        write_settings(root, ingest={"sources": [log]}, replay=asked)
        pipeline = pipeline_at(root)
        run_batches(pipeline)
    pipeline.publish()
    life = json.loads(traced(root, state["state_id"], "--json"))
    [row] = life["publish"]["positives/train"]
    assert (row["kind"], row["n_looks"]) == ("lesson", 1)
    assert "LOW = 1" in row["prompt"][-1]["content"]
    [tokens] = life["train"]["tokens"]
    read, scored = tokens["prompt (read, not scored)"], tokens["chosen (scored)"]
    assert "LOW = 1" in read["text"].rpartition("low.py")[2]
    assert "LOW = 2" not in read["text"]
    assert "LOW = 2" in scored["text"]
    assert len(scored["token_ids"]) == scored["n_tokens"]
