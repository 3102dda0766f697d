"""Actions tried at the states of a real session: what that makes of votes and pairs."""

import pytest

from replay_pipeline.ingesters import ClaudeCodeIngester
from replay_pipeline.redaction.redactor import Redactor
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.stages.work.trials import try_actions, verdicts_of
from replay_pipeline.stages.work.workspaces import Workspaces
from replay_pipeline.types import TeacherAction
from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox
from replay_pipeline.workspaces.verdicts import Judge
from tests.support.messages import call
from tests.support.votes import extract_pairs
from tests.support.worked import Worked

FILES = {
    "tide/high.py": "def high():\n    return 3\n",
    "tide/low.py": "def low():\n    return 1\n",
}


@pytest.fixture
def work(open_path):
    work = Worked(open_path / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    work.read("tide/low.py")
    return work


def edit(work, old, new, name="tide/high.py"):
    path = str(work.root / name)
    return call("Edit", file_path=path, old_string=old, new_string=new)


def pairs_of(tmp_path, work, state_id, answers, execute="files", known=frozenset()):
    path = work.session.write(tmp_path / "projects")
    states = list(ClaudeCodeIngester(redact=False).ingest(path))
    rows = [
        TeacherAction(
            state_id=state_id, teacher=name, model=f"{name}/x", family=name, action=action
        )
        for name, action in answers.items()
    ]
    work_of = Workspaces(Settings(), sources=[path], repositories=[work.root])
    judge = execute if isinstance(execute, Judge) else Judge(execute)
    trials, counts = try_actions(work_of, judge, states, rows)
    verdicts = verdicts_of(trials, states, rows)
    is_refused = verdicts.get((state_id, "agent")) is False
    right = {name for (_, name), is_right in verdicts.items() if is_right}
    assert is_refused or right == known  # that an action works does not make it right
    report = extract_pairs(states, rows, 2, trials=trials, verdicts=verdicts, include_natural=False)
    counts["n_known_wrong"] = list(verdicts.values()).count(False)
    (outcome,) = [row for row in report.outcomes if row["state_id"] == state_id]
    return outcome, report.pairs, counts


def test_a_consensus_that_would_fail_makes_no_pair(tmp_path, work):
    """The text is shown, and so it passes for possible; but it stands there no more."""
    work.put({"tide/high.py": "def high():\n    return 33\n"})
    work.session.wait(5)
    work.bash("true")
    state = work.edit("tide/high.py", "return 33", "return 4")
    stale = edit(work, "return 3\n", "return 4\n")
    answers = {"qwen": stale, "glm": stale}
    outcome, pairs, counts = pairs_of(tmp_path, work, state, answers)
    assert (outcome["outcome"], outcome["why"]) == ("would_fail", "modified_since_read")
    assert pairs == []
    assert (counts["n_states"], counts["n_tried"]) == (1, 2)
    outcome, pairs, counts = pairs_of(tmp_path, work, state, answers, execute="off")
    assert (outcome["outcome"], counts["n_tried"]) == ("pair", 0)
    assert "chosen_trial" not in pairs[0]


def test_a_side_that_works_against_one_that_fails_is_told_on_the_pair(tmp_path, work):
    state = work.failed(
        "Edit", "String to replace not found in file.",
        file_path=str(work.root / "tide" / "high.py"), old_string="return 5", new_string="return 6",
    )  # fmt: skip
    answer = edit(work, "return 3", "return 4")
    outcome, (pair,), counts = pairs_of(tmp_path, work, state, {"qwen": answer, "glm": answer})
    assert outcome["outcome"] == "pair"
    assert counts["n_known_wrong"] == 1  # the agent's own
    assert pair["chosen_trial"] == "works"
    assert pair["rejected_trial"] == "fails: string_not_found"


def test_two_answers_with_one_effect_are_one_vote(tmp_path, work):
    """Words that no rule of the matcher calls the same, and one and the same file afterwards."""
    state = work.edit("tide/low.py", "return 1", "return 2")
    path = str(work.root / "tide" / "high.py")
    answers = {
        "qwen": edit(work, "return 3", "return 4"),
        "glm": call("Write", file_path=path, content="def high():\n    return 4\n"),
    }
    outcome, (pair,), _ = pairs_of(tmp_path, work, state, answers)
    assert outcome["outcome"] == "pair"
    assert (pair["n_teachers_agreeing"], pair["agreement_level"]) == (2, "effect")
    assert pair["evidence"] == ["execution"]
    outcome, pairs, _ = pairs_of(tmp_path, work, state, answers, execute="off")
    assert (outcome["outcome"], pairs) == ("no_consensus", [])


def test_a_consensus_that_does_what_the_agent_did_is_an_agreement(tmp_path, work):
    state = work.edit("tide/high.py", "return 3", "return 4")
    path = str(work.root / "tide" / "high.py")
    write = call("Write", file_path=path, content="def high():\n    return 4\n")
    outcome, pairs, _ = pairs_of(tmp_path, work, state, {"qwen": write, "glm": write})
    assert (outcome["outcome"], pairs) == ("agreement", [])


@pytest.mark.slow
def test_the_pipeline_tries_answers_to_redacted_prompts_only_when_told_to(tmp_path, monkeypatch):
    """Names in folders are redacted in what teachers see, and put back where it is tried."""
    work = Worked(tmp_path / "home" / "mira" / "tides")
    work.begin(FILES)
    work.read("tide/high.py")
    work.edit("tide/high.py", "return 3", "return 4")
    work.read("tide/low.py")
    work.session.assistant("Done.")
    path = work.session.write(tmp_path / "projects")
    changes = {
        "ingest": {"sources": [str(path)]},
        "replay": {"rehearsal_teachers": True, "ask_at": "steps"},
    }
    off = Pipeline(Settings.load(data_dir=tmp_path / "data", changes=changes))
    (batch,) = off.ingest_new()
    off.replay(batch)
    assert "tried" not in off.pairs(batch).report
    changes["workspaces"] = {"execute": "files"}
    on = Pipeline(Settings.load(data_dir=tmp_path / "data", changes=changes))
    receipt = on.pairs(batch)
    assert not receipt.is_reused
    assert receipt.report["tried"]["n_states"] == 3
    assert receipt.report["tried"]["n_tried"] >= 3
    assert on.pairs(batch).is_reused
    rows = on.root.read("dpo_pairs", batch).to_pylist()
    assert {row["rejected_trial"] for row in rows} <= {"works", None}


def test_commands_of_a_state_run_and_two_with_one_effect_are_one_vote(tmp_path, work):
    state = work.edit("tide/low.py", "return 1", "return 2")
    answers = {
        "qwen": call("Bash", command="sed -i 's/return 3/return 4/' tide/high.py"),
        "glm": call("Bash", command="perl -pi -e 's/3/4/' tide/high.py"),
        "other": call("Bash", command="exit 3"),
    }
    judge = Judge("commands", sandbox=Sandbox(limits=CommandLimits(disk_bytes=20_000_000)))
    outcome, (pair,), counts = pairs_of(tmp_path, work, state, answers, judge)
    assert outcome["outcome"] == "pair"
    assert (pair["n_teachers_agreeing"], pair["chosen_trial"]) == (2, "works")
    assert pair["evidence"] == ["execution"]
    assert counts["n_run"] == 3


CHECKED = FILES | {"test_tide.py": "from tide.high import high\nassert high() == 4, high()\n"}


def test_what_the_projects_check_says_is_evidence_for_a_pair(tmp_path, open_path):
    """One edit mends the test, one leaves it as it was, and one breaks a test that passed."""
    sandbox = Sandbox(limits=CommandLimits(disk_bytes=20_000_000))
    work = Worked(open_path / "tides")
    work.begin(CHECKED)
    work.read("tide/high.py")
    work.read("tide/low.py")
    wrong = work.edit("tide/high.py", "return 3", "return 5")
    judge = Judge("commands", sandbox=sandbox, checks={str(work.root): "python3 test_tide.py"})
    mends = edit(work, "return 3", "return 4")
    outcome, (pair,), counts = pairs_of(
        tmp_path, work, wrong, {"qwen": mends, "glm": mends}, judge, known={"qwen", "glm"}
    )
    assert (outcome["outcome"], pair["evidence"]) == ("pair", ["check"])
    assert pair["chosen_trial"] == "works, check fixed"
    assert pair["rejected_trial"] == "works, check fails"
    assert (counts["n_checked"], counts["n_fixed"]) == (2, 1)
    assert pair["p_better"] > 0.95
    tried = outcome["trials"]
    assert "-    return 3\n+    return 4" in tried[pair["chosen"]]["diff"]
    assert "-    return 3\n+    return 5" in tried[pair["rejected"]]["diff"]

    work.edit("tide/high.py", "return 5", "return 4")
    right = work.edit("tide/low.py", "return 1", "return 2")
    breaks = edit(work, "return 4", "return 6")
    outcome, pairs, _ = pairs_of(tmp_path, work, right, {"qwen": breaks, "glm": breaks}, judge)
    assert (outcome["outcome"], pairs) == ("would_fail", [])
    assert outcome["why"] == "the project's check fails after it"
    (broken,) = [each for each in outcome["trials"].values() if "broken" in each["result"]]
    assert broken["result"] == "works, check broken"


def test_what_is_kept_of_a_trial_has_no_secret_and_no_name_of_a_person(tmp_path):
    token = "ghp_" + "k3Jx9QmZ2vT7yB4nR8wL" + "5cD1fG6hS0pAeUoI"
    work = Worked(tmp_path / "home" / "mira" / "tides")
    work.begin({"keys.py": f'TOKEN = "{token}"\nHIGH = 3\n'})
    work.read("keys.py")
    state = work.edit("keys.py", "HIGH = 3", "HIGH = 5")
    path = work.session.write(tmp_path / "projects")
    states = list(ClaudeCodeIngester(redact=False).ingest(path))
    answer = edit(work, "HIGH = 3", "HIGH = 4", "keys.py")
    rows = [TeacherAction(state_id=state, teacher="qwen", model="q/x", family="q", action=answer)]
    workspaces = Workspaces(Settings(), sources=[path], repositories=[work.root])
    trials, _ = try_actions(workspaces, Judge("files"), states, rows, redactor=Redactor())
    kept = repr(trials[state])
    assert "HIGH = 4" in kept
    assert token not in kept
    assert "/mira/" not in kept
