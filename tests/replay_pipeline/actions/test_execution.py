"""Commands that the matcher calls the same do the same when they are run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replay_pipeline.actions import programs
from replay_pipeline.actions.shell import shell_plan
from tests.twins.samples import NOT_RUN, SAMPLES

ROOT = Path(__file__).parents[3]
N_TWINS = 300
MIN_PROGRAMS = 80
"""What every Debian with git has: coreutils, diffutils, findutils, grep, sed, tar, gzip, awk, git."""


def executed(*options):
    """The report of `python -m tests.twins`."""
    command = [sys.executable, "-m", "tests.twins", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["false_merges"] else 0)
    return report


@pytest.mark.slow
def test_twins_of_known_programs_do_the_same_when_they_are_run():
    report = executed("--count", str(N_TWINS), "--seed", "1")
    wrong = [one["commands"] for one in report["false_merges"]]
    assert not wrong, "\n".join(map(repr, wrong))
    assert report["twins"] >= N_TWINS
    # Programs that are not there are told by name; most are on every machine.
    assert report["programs"] + len(report["not_there"]) >= MIN_PROGRAMS
    assert report["programs"] >= 60, report["not_there"]
    # Twins of commands that merely fail would show little.
    assert report["twins_that_succeed"] >= report["twins"] / 3


@pytest.mark.slow
def test_execution_finds_a_rule_that_is_wrong(tmp_path):
    """With one override forgotten, and one spelling given to another option, twins differ."""
    file = ROOT / "replay_pipeline" / "actions" / "shell_programs.toml"
    text = file.read_text("utf-8")
    wrong = text.replace('override = ["force i I interactive"]', "").replace(
        "-n,--number -s,--squeeze-blank", "-s,--number -n,--squeeze-blank"
    )
    assert len(wrong) < len(text) - 30
    (tmp_path / "shell_programs.toml").write_text(wrong)
    script = (
        "import sys; from pathlib import Path; from replay_pipeline.actions import programs\n"
        f"programs.PROGRAMS.update(programs.programs_from(Path({str(tmp_path)!r}, "
        "'shell_programs.toml').read_text()))\n"
        "from tests.twins.__main__ import run_twins\n"
        "wrong = run_twins(400, 1, ['rm', 'cat'])['false_merges']\n"
        "print(sorted({one['program'] for one in wrong}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.stdout == "['cat', 'rm']\n", done.stderr


def test_every_table_is_executed_or_says_why_not():
    titles = {}
    for name, program in programs.PROGRAMS.items():
        titles.setdefault(id(program), []).append(name)
    named = {", ".join(names) for names in titles.values()}
    assert named >= SAMPLES.keys() | NOT_RUN.keys()
    assert not SAMPLES.keys() & NOT_RUN.keys() - {"nohup, npx, bunx"}
    assert all(NOT_RUN.values())
    bare = named - SAMPLES.keys() - NOT_RUN.keys()
    without_options = {t for t in bare if programs.PROGRAMS[t.split(", ")[0]].options is None}
    assert not without_options


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rm -i --force a", "rm --force -i a"),
        ("rm -i -f a", "rm -f -i a"),
        ("git show -s -p", "git show -p -s"),
        ("git log -5 -n 3", "git log -n 3 -5"),
        ("sed -e p -f s a", "sed -f s -e p a"),
        ("seq -5 -1", "seq -1 -5"),
        ("rg -g '*.py' --glob '!a*' x", "rg --glob '!a*' -g '*.py' x"),
        ("rg -i --case-sensitive x", "rg --case-sensitive -i x"),
        ("pytest -s --capture=fd", "pytest --capture=fd -s"),
        ("echo -b -a", "echo -a -b"),
        ("printf %s --b --a", "printf %s --a --b"),
        ("kill -1 -9", "kill -9 -1"),
        ("ls -f -t", "ls -t -f"),
        ("ls -f -s", "ls -s -f"),
        ("head -v -5 a", "head -5 -v a"),
        ("cat -", "cat ./-"),
        ("rm *", "rm ./*"),
        ("ls $x -l", "ls -l $x"),
        ("git log --all main", "git log main --all"),
        ("git log --branches=a main", "git log main --branches=a"),
        ("git grep x -l", "git grep -l x"),
        ("find a -path './a/*'", "find ./a -path './a/*'"),
        ("source a", "source ./a"),
        ("cp -s ./a b", "cp -s /w/a b"),
        ("time -p ls", "time '-p' ls"),
        ("time -p -- ls", "time -p '--' ls"),
        ("git show --no-abbrev-commit --oneline", "git show --oneline --no-abbrev-commit"),
        ("mytool -- --b --a", "mytool -- --a --b"),
        ("go test ./a -v ./b", "go test -v ./a ./b"),
        ("go build ./a -o x", "go build -o x ./a"),
        ("go test ./a", "go test a"),
        ("cargo test -- x y", "cargo test x -- y"),
        ("docker exec web ls -t", "docker exec -t web ls"),
        ("docker run -v a:/a --mount b x", "docker run --mount b -v a:/a x"),
        ("gh api x -f a=1 -F b=2", "gh api x -F b=2 -f a=1"),
        ("terraform plan --var=x --var-file=a", "terraform plan --var-file=a --var=x"),
        ("kubectl -n a get pods", "kubectl get -n b pods"),
        ("npm i -D --save-prod x", "npm i x"),
        ("mytool --quiet --verbose", "mytool --verbose --quiet"),
    ],
)
def test_options_and_operands_that_act_on_each_other_keep_their_order(one, other):
    assert shell_plan(one, "/w").effect != shell_plan(other, "/w").effect


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("lsof -ti :3000", "lsof -t -i :3000"),
        ("lsof -ti:3000", "lsof -i:3000 -t"),
        ("find ./src -name x", "find src -name x"),
        ("find . -exec rm '{}' \\;", "find . -exec rm {} ';'"),
        ("node ./a.js x", "node a.js x"),
        ("source ./venv/bin/activate", "source venv/bin/activate"),
        ("git checkout -- ./a", "git checkout -- a"),
        ("git log -5", "git log --max-count=5"),
        ("head -5 a", "head --lines 5 a"),
        ("ls --all -l", "ls -la"),
        ("grep -rn x a --include=*.py", "grep --recursive --line-number --include=*.py x ./a"),
        ("timeout 60 pytest -q -x", "timeout 60 pytest -x -q"),
        ("python -m pytest --verbose a", "python -m pytest a -v"),
        ("go test -v -run X ./a", "go test ./a --run=X -v"),
        ("go build -race -o x ./a", "go build -o=x -race ./a"),
        ("docker ps -a", "docker ps --all"),
        ("docker exec -it web ls", "docker exec -i -t web ls"),
        ("gh pr view 3 --json body -q .body", "gh pr view --jq=.body --json body 3"),
        ("kubectl get pods -n x -o json", "kubectl get pods --output=json --namespace x"),
        ("cargo test -p x foo", "cargo test foo --package x"),
        ("npm i -D x", "npm i x --save-dev"),
        ("pip install -q -U x", "pip install --upgrade x --quiet"),
        ("golangci-lint run -v ./a", "golangci-lint run ./a --verbose"),
    ],
)
def test_spellings_of_one_command_are_one(one, other):
    assert shell_plan(one, "/w").effect == shell_plan(other, "/w").effect


@pytest.mark.parametrize(
    ("one", "other"),
    [("pytest -k cart", "pytest"), ("cat a | head -5", "cat a"), ("ls | head | cat", "ls | tail")],
)
def test_what_only_selects_or_shows_is_no_object(one, other):
    assert shell_plan(one, "/w").target == shell_plan(other, "/w").target


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ('[ls]\noptions = "-a,--all -a"', "listed twice"),
        ('[ls]\noptions = "-all"', "misspelt"),
        ('[ls]\noptions = "-a"\noverride = ["a b"]', "b is listed as overriding"),
        ('[ls]\noptions = "-a"\nobjects = "b"', "b is listed under objects"),
        ('[ls]\noptions = "-a,-NUM"', "-NUM needs `number`"),
        ('[ls]\noptoins = "-a"', "optoins"),
        ('[ls]\noperands = "files"', "files"),
        ('["ls, ls"]', "listed twice"),
    ],
)
def test_a_wrong_table_is_refused_when_it_is_loaded(table, complaint):
    with pytest.raises(ValueError, match=complaint):
        programs.programs_from(table)
