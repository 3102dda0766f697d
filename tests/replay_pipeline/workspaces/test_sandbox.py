"""Nothing gets out of the box: each way that is known is tried."""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.workspaces.sandbox import CommandLimits, Sandbox

FILES = {"a.txt": b"one\n", "b/c.txt": b"two\n", "run.sh": b"#!/bin/sh\necho ran\n"}


def test_a_command_sees_the_tree_and_its_changes_come_back(in_box):
    ran = in_box(
        "cat a.txt; ./run.sh; echo more >> a.txt; rm b/c.txt; mkdir d; echo new > d/e; exit 3",
        FILES,
    )
    assert (ran.status, ran.output) == (3, "one\nran\n")
    assert ran.changes == {
        "/work/tide/a.txt": "one\nmore\n",
        "/work/tide/b/c.txt": None,
        "/work/tide/d/e": "new\n",
    }


def test_what_is_written_back_as_it_was_is_no_change(in_box):
    assert in_box("cp a.txt x; mv x a.txt; touch b/c.txt", FILES).changes == {}


def test_the_network_is_not_there(in_box):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        ran = in_box(f"echo out > /dev/tcp/127.0.0.1/{port}; cat /proc/net/dev | tail -n +3")
        listener.settimeout(0.01)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert ran.status == 0
    assert "refused" in ran.output or "unreachable" in ran.output
    assert {line.split(":")[0].strip() for line in ran.output.splitlines() if "0:" in line or "lo:" in line} <= {"lo"}  # fmt: skip


def test_sockets_of_this_machine_are_not_there(in_box, tmp_path):
    ran = in_box("ls -A /var/run /run/docker.sock /run/dbus /tmp 2>/dev/null; find / -type s")
    assert [line for line in ran.output.splitlines() if "denied" not in line] == ["/tmp:"]


def test_home_and_environment_are_not_there(in_box, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-of-this-user")
    secret = tmp_path / "secret"
    secret.write_text("of this user")
    ran = in_box(
        f"env; cat {secret} ~/.ssh/* /etc/passwd /etc/shadow; ls /home /root {Path.home()}"
    )
    assert "of-this-user" not in ran.output
    assert "of this user" not in ran.output
    assert "root:" not in ran.output
    assert ran.output.count("No such file or directory") >= 6


def test_other_processes_are_neither_seen_nor_reached(in_box):
    ran = in_box(f"ls -d /proc/[0-9]* | wc -l; kill -9 {os.getppid()}; kill -9 -1; echo after")
    assert ran.status is None  # it has ended its own box
    assert int(in_box("ls -d /proc/[0-9]* | wc -l").output) < 20
    os.kill(os.getppid(), 0)


@pytest.mark.slow
def test_a_fork_bomb_ends_with_its_time(box):
    small = Sandbox(limits=CommandLimits(timeout_s=3.0, n_processes=40, disk_bytes=5_000_000))
    begun = time.perf_counter()
    ran = small.run("b() { b | b & }; b; sleep 20", root="/w", files={}, cwd="/w")
    assert ran.status is None or time.perf_counter() - begun < 20
    still = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "b() { b | b & }" not in still


def test_a_full_disk_is_that_of_the_box(in_box):
    before = os.statvfs("/tmp").f_bavail
    fill = "for d in . /tmp /run /dev/shm /dev; do dd if=/dev/zero of=$d/big bs=1M count=200; done"
    ran = in_box(f"{fill} 2>&1; rm -f big /run/big; echo done")
    assert ran.output.count("No space left") + ran.output.count("File size limit") >= 3
    assert "Read-only file system" in ran.output
    assert before - os.statvfs("/tmp").f_bavail < 200_000_000 / os.statvfs("/tmp").f_frsize


def test_memory_of_a_process_has_a_limit(in_box):
    ran = in_box("head -c 3000000000 /dev/zero | tail; echo $?")
    assert ran.status == 0
    assert "memory exhausted" in ran.output or "Cannot allocate" in ran.output


def test_more_output_than_is_kept_is_thrown_away(in_box):
    ran = in_box("yes | head -c 9000000; echo end >&2; exit 4")
    assert (ran.status, len(ran.output)) == (4, 1_000_000)


@pytest.mark.parametrize(
    "trick",
    [
        "ls /proc/1/root/home /proc/1/cwd/home",
        "echo 1 > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "mount -t tmpfs none /mnt",
        "unshare -Ur id",
        "mknod disk b 8 0",
        "chroot / true",
        "echo x > /usr/bin/x",
        "cat /dev/mem",
        "nsenter -t 1 -a true",
    ],
)
def test_tricks_with_proc_mounts_and_devices_fail(in_box, trick):
    assert in_box(trick).status not in (0, None)


def test_setuid_programs_give_nothing(in_box):
    ran = in_box(
        "grep -E 'NoNewPrivs|CapEff|CapBnd' /proc/self/status; cp /bin/bash own; chmod u+s own;"
        " ./own -p -c 'id -u'"
    )
    assert "NoNewPrivs:\t1" in ran.output
    assert "CapEff:\t0000000000000000" in ran.output
    assert "CapBnd:\t0000000000000000" in ran.output
    assert ran.output.splitlines()[-1] == str(os.geteuid() or 65_534)


def test_links_out_of_the_tree_lead_nowhere(in_box, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine\n")
    ran = in_box(
        f"ln -s {target} link; echo over > link; ln -s / top; ln -s ../../../../etc/passwd p"
    )
    assert target.read_text() == "mine\n"
    assert ran.changes == {
        "/work/tide/link": f"-> {target}",
        "/work/tide/p": "-> ../../../../etc/passwd",
        "/work/tide/top": "-> /",
    }


def test_a_stream_that_is_no_tar_is_no_result(in_box):
    """The command writes into the pipe through which the box tells what was done."""
    ran = in_box("echo garbage > /proc/$PPID/fd/1; kill -9 $PPID")
    assert ran.changes == {}
    assert ran.status is None


def test_what_writes_for_ever_into_the_result_is_stopped(in_box):
    ran = in_box("for p in /proc/[0-9]*; do yes > $p/fd/1 & done 2>/dev/null; wait", timeout_s=2)
    assert (ran.status, ran.changes) == (None, {})


def test_folders_that_are_named_can_be_read_and_not_written(box, tmp_path):
    shared = Path(tmp_path.parent)  # pytest's own folders are closed to others
    tool = tmp_path / "bin" / "tide"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho high\n")
    for folder in (tool, tool.parent, tmp_path, shared, shared.parent, shared.parent.parent):
        if folder != Path("/tmp"):
            folder.chmod(0o755)
    mounted = Sandbox(limits=box.limits, mounts=[tmp_path])
    ran = mounted.run(f"tide; touch {tmp_path}/x", root="/w", files={}, cwd="/w")
    assert ran.output.startswith("high\n")
    assert "Read-only file system" in ran.output


def test_without_its_program_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"here .it is not installed.*apt-get install"):
        Sandbox()


def test_a_program_that_may_not_make_a_box_is_refused_at_once(monkeypatch, tmp_path):
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n"
    )
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="commands cannot be run in bubblewrap here"):
        Sandbox()
