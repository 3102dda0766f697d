"""Programs that tests fork behave as programs that are started."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.forked import fork_of, forked, forked_python

KIND = "teachers"  # quick to load; the others differ in nothing else


def run(code: str, *words: str, **options) -> subprocess.CompletedProcess[str]:
    command = forked([sys.executable, "-c", code, *words], KIND)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('the reason')", 1),
        ("raise ValueError('the reason')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_fork_ends_as_the_program_would(code, status):
    done = run(code)
    assert done.returncode == status, done.stderr
    assert ("the reason" in done.stderr) == ("the reason" in code)


def test_a_fork_has_the_words_folder_variables_and_input_of_its_command(tmp_path):
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['COLOUR'], sys.stdin.read())"
    done = run(code, "a", "b c", cwd=tmp_path, env=os.environ | {"COLOUR": "blue"}, input="typed")
    assert done.stdout == f"['-c', 'a', 'b c'] {tmp_path} blue typed\n"


def test_files_beyond_the_standard_ones_are_handed_over():
    reading, writing = os.pipe()
    run(f"import os; os.write({writing}, b'through it')", pass_fds=[writing])
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "through it"


def test_what_a_fork_starts_by_itself_is_forked_where_that_is_asked_for():
    start = "subprocess.run([sys.executable, '-P', '-c', 'import sys; print(sys.executable)', {}])"
    named = "replay_pipeline.testing.__main__"
    code = f"import subprocess, sys; {start.format(repr(named))}; {start.format(repr('other'))}"
    python = forked_python(KIND)
    command = forked([sys.executable, "-c", code], KIND, children=python)
    assert subprocess.check_output(command, text=True).split() == [python, sys.executable]


def test_who_has_started_a_server_is_not_waited_for_beyond_its_end():
    code = f"from tests.support.forked import forked; print(forked([], {KIND!r})[-2]); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTEST_XDIST_TESTRUNUID": f"of-{os.getpid()}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    where = Path(process.stdout.readline().strip())
    with where.with_name("users").open("w"):  # as another worker, for whom it goes on
        process.communicate("\n", timeout=60)
        assert where.exists()
    while where.parent.exists():
        time.sleep(0.01)


def test_a_signal_reaches_the_fork():
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)"  # a signal just before one long sleep would wait for its end
    )
    process = subprocess.Popen(
        forked([sys.executable, "-c", code], KIND), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_killed_client_takes_its_fork_with_it_and_leaves_the_server():
    process = subprocess.Popen(forked([sys.executable, "-c", "import time; time.sleep(600)"], KIND))
    fork = fork_of(process)
    process.kill()
    process.wait(60)
    while Path(f"/proc/{fork}").exists():
        time.sleep(0.01)
    where = forked([], KIND)[-2]
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(where)  # and it is gone before it has asked for anything
    assert run("print('still there')").stdout == "still there\n"
