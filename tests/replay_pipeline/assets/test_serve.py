import sys

from replay_pipeline.assets import serve

HARD_OF_HEARING = """
import signal, sys
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
open(sys.argv[1], "w").close()
while len(heard) < 2:
    signal.pause()
"""


def test_a_daemon_that_loses_a_signal_is_told_again(tmp_path, monkeypatch):
    command = [sys.executable, "-c", HARD_OF_HEARING, str(tmp_path / "ready")]
    monkeypatch.setattr(serve, "python", lambda *_: command)
    monkeypatch.setattr(serve, "_TELL_AGAIN_S", 0.05)
    with serve._daemon("workspace.yaml") as given_up:
        while not (tmp_path / "ready").exists():
            assert not given_up.is_set()
    assert not given_up.is_set()
