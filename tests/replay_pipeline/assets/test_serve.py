import contextlib
import sys
import threading
from types import SimpleNamespace

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


def test_all_ends_when_the_code_server_does_not_come_up_again(monkeypatch, capsys):
    """Dagster's own thread that starts it again dies where that takes too long."""
    killed, given_up = threading.Event(), threading.Event()
    restarts = threading.Thread(target=killed.wait)
    restarts.start()

    class Servers(contextlib.nullcontext):
        def __init__(self, *_):
            super().__init__()

        _process_monitoring_threads = (restarts,)

        def __enter__(self):
            return self

        def get_code_server_specs(self):
            return []

    monkeypatch.setattr(serve, "ProxyServerManager", Servers)
    monkeypatch.setattr(serve, "WorkspaceFileTarget", list)
    monkeypatch.setattr(serve, "_RECONCILED_EVERY_S", 0.01)
    monkeypatch.setattr(serve, "reconcile", lambda _: None)
    monkeypatch.setattr(serve, "retry_dropped", lambda _: killed.set())
    server = SimpleNamespace(should_exit=False)
    with serve._code_servers(None, "workspace.yaml") as (_, are_kept):
        assert are_kept()
        serve._look_after(SimpleNamespace(instance=None), given_up, server, are_kept)
    assert killed.is_set()
    assert given_up.is_set()
    assert server.should_exit
    assert "did not come up again" in capsys.readouterr().err
