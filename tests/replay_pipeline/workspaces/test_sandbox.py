"""Nothing gets out of the box: each way that is known is tried."""

import ctypes
import os
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest

from replay_pipeline.errors import ConfigError
from replay_pipeline.workspaces import box as box_rules
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


def test_home_and_environment_are_not_there(in_box, open_path, monkeypatch):
    monkeypatch.setenv("OPENROUTER_API_KEY", "sk-or-of-this-user")
    secret = open_path / "secret"
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


@pytest.mark.parametrize(
    "command",
    [
        "for d in . /tmp /run /dev/shm; do head -c 9000000 /dev/zero > $d/big; done; sleep 9; echo done",
        "head -c 90000000 /dev/zero > big; echo done",
        "for n in 1 2 3 4 5 6 7 8; do perl -e '$x = \"x\" x 2e8; sleep 9' & done; wait; echo done",
        "perl -e '$x = \"x\" x 3e9' || exit 1; echo done",
    ],
    ids=["disk of all", "disk", "memory of all", "memory"],
)
def test_one_limit_holds_for_all_files_and_one_for_all_processes(in_box, command):
    ran = in_box(command)
    assert "done" not in ran.output
    assert ran.status != 0
    assert (
        len(
            in_box("for d in . /tmp; do head -c 8000000 /dev/zero > $d/big; done; echo done").output
        )
        == 5
    )


def test_address_space_is_no_memory_as_java_and_webassembly_need_it(in_box):
    """Both set aside gigabytes that they never touch; the limit is of what they do."""
    number = {"x86_64": 9, "aarch64": 222}[os.uname().machine]
    private_and_anonymous = 0x22
    mapped = f"syscall({number}, 0, 16 << 30, 0, {private_and_anonymous}, -1, 0)"
    assert (
        in_box(f"perl -e 'print {mapped} == -1 ? qq(refused) : qq(set aside)'").output
        == "set aside"
    )


def test_more_output_than_is_kept_is_thrown_away(in_box):
    ran = in_box("yes | head -c 9000000; echo end >&2; exit 4")
    assert (ran.status, len(ran.output)) == (4, 1_000_000)


def call(number, *arguments):
    """A command that makes a call of the kernel, and says so where the kernel, and no filter, answers."""
    told = ", ".join(map(str, arguments))
    denied = " or ".join(f"$!{{{name}}}" for name in ("EPERM", "ENOSYS", "EAFNOSUPPORT"))
    return f"perl -e 'use Errno; $b = \"\\0\" x 64; $r = syscall({number}, {told}); print qq(escaped) unless $r == -1 and ({denied})'"


ATTEMPTS = {
    "the session keyring": call(250, 0, -3, 0),
    "a key of the session": call(250, 10, -3, "$b"),
    "a new key": call(248, "$b", "$b", "$b", 1, -3),
    "asking for a key": call(249, "$b", "$b", 0, -3),
    "a user namespace": call(56, 0x10000011, 0, 0, 0, 0),
    "clone3": call(435, "$b", 64),
    "unshare": call(272, 0x10000000),
    "setns": call(308, 0, 0),
    "mount": call(165, "$b", "$b", "$b", 0, 0),
    "the new mount": call(430, "$b", 0),
    "chroot": call(161, "$b"),
    "pivot_root": call(155, "$b", "$b"),
    "ptrace": call(101, 16, 1, 0, 0),
    "memory of another": call(310, 1, 0, 0, 0, 0, 0),
    "files of another": call(438, 0, 0, 0),
    "files by handle": call(304, -1, "$b", 0),
    "bpf": call(321, 0, "$b", 64),
    "io_uring": call(425, 8, "$b"),
    "userfaultfd": call(323, 0),
    "perf": call(298, "$b", 0, -1, -1, 0),
    "a module": call(175, "$b", 64, "$b"),
    "another kernel": call(246, 0, 0, "$b", 0),
    "a restart": call(169, 0, 0, 0, "$b"),
    "the clock": call(164, "$b", 0),
    "raw packets": call(41, 17, 3, 0),
    "virtual sockets": call(41, 40, 1, 0),
    "sockets of ciphers": call(41, 38, 5, 0),
    "input to a terminal": call(16, 0, 0x5412, "$b"),
    "the folder of the first process": "ls /proc/1/root/home /proc/1/cwd/home && echo escaped",
    "the kernel's settings": "echo 1 > /proc/sys/kernel/core_pattern && echo escaped",
    "the kernel's keys": "echo b > /proc/sysrq-trigger && echo escaped",
    "a device": "mknod disk b 8 0 && echo escaped",
    "the system's programs": "echo x > /usr/bin/x && echo escaped",
    "the machine's memory": "head -c 1 /dev/mem && echo escaped",
    "another namespace": "unshare -Ur id && echo escaped; nsenter -t 1 -a true && echo escaped",
    "files of the guard": "ls /proc/2/fd /proc/2/cwd/ && echo escaped; head -c 1 /proc/2/mem && echo escaped",
}
FORGERIES = {
    "a status written behind its back": "(sleep 0.3; for f in /run/*; do echo 0 > $f; done; echo 0 > /run/status) & exit 3",
    "the files of all processes": "(while :; do for f in /proc/[0-9]*/fd/*; do printf 'begun\\0000\\0\\0' > $f; done; done) 2>/dev/null & sleep 0.3; exit 3",
    "the first process's output": "printf 'begun\\0000\\0\\0' > /proc/1/fd/1; printf 'begun\\0000\\0\\0' > /proc/1/fd/2; exit 3",
    "the end of the guard": "printf 'begun\\0000\\0\\0' > /proc/$PPID/fd/9; kill -9 $PPID; exit 0",
    "the end of all": "kill -9 -1; exit 0",
    "the stopped guard": "kill -STOP $PPID; sleep 20; exit 0",
    "an error of the box": "echo 'bwrap: No permissions' > /proc/1/fd/2; kill -9 $PPID",
    "the time": "touch -d 2099-01-01 . /run /tmp; echo more >> a.txt; exit 3",
    "names": "touch $'\\n0' 'begun' 'status'; exit 3",
}


@pytest.mark.parametrize("way", ATTEMPTS)
def test_no_way_leads_out(in_box, way):
    ran = in_box(ATTEMPTS[way], FILES)
    assert "escaped" not in ran.output


@pytest.mark.parametrize("way", FORGERIES)
def test_no_way_forges_what_the_box_tells(in_box, way):
    ran = in_box(FORGERIES[way], FILES, timeout_s=4)
    assert ran.status in (3, None)
    assert (ran.status == 3) == ("exit 3" in FORGERIES[way])
    is_changed = way in ("the time", "names")
    assert bool(ran.changes) == is_changed
    if way == "the time":
        assert ran.changes["/work/tide/a.txt"] == "one\nmore\n"


def test_a_key_of_this_session_is_not_seen(in_box, monkeypatch):
    """Without the filter, the keyring alone: the box has one of its own."""
    libc = ctypes.CDLL(None)
    number = libc.syscall(248, b"user", b"replay-test", b"secret", 6, -3)
    if number == -1:
        pytest.fail("this machine gives no keys: run the test where `add_key` is allowed")
    allowing = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # a filter that allows all
    monkeypatch.setattr(box_rules, "_filter", lambda: allowing)
    search = "perl -e '$t = qq(user); $n = qq(replay-test); $r = syscall(250, 10, -3, $t, $n, 0); print $r > 0 ? qq(escaped) : qq(none)'"
    ran = in_box(search)
    assert ran.output == "none"


def test_setuid_programs_give_nothing(in_box):
    ran = in_box(
        "grep -E 'NoNewPrivs|CapEff|CapBnd' /proc/self/status; cp /bin/bash own; chmod u+s own;"
        " ./own -p -c 'id -u'"
    )
    assert "NoNewPrivs:\t1" in ran.output
    assert "CapEff:\t0000000000000000" in ran.output
    assert "CapBnd:\t0000000000000000" in ran.output
    assert ran.output.splitlines()[-1] == str(os.geteuid() or 65_534)


def test_links_out_of_the_tree_lead_nowhere(in_box, open_path):
    target = open_path / "target"
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


def test_folders_that_are_named_can_be_read_and_not_written(box, open_path):
    tool = open_path / "bin" / "tide"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho high\n")
    for each in (tool, tool.parent):
        each.chmod(0o755)
    mounted = Sandbox(limits=box.limits, mounts=[open_path])
    ran = mounted.run(f"tide; touch {open_path}/x", root="/w", files={}, cwd="/w")
    assert ran.output.startswith("high\n")
    assert "Read-only file system" in ran.output


def test_without_its_program_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"here .it is not installed.*apt-get install"):
        Sandbox()


def test_a_program_that_may_not_make_a_box_is_refused_at_once(monkeypatch, open_path):
    program = open_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="commands cannot be run in bubblewrap here"):
        Sandbox()
