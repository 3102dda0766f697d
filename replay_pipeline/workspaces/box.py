"""What keeps a box closed beyond its namespaces: calls of the kernel, keys, and limits for all its processes."""

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from replay_pipeline.errors import ConfigError

_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
"""libseccomp's action that fails with the error in its lower bits."""
_EQUAL, _AT_LEAST, _HAS_BITS = 4, 5, 7
_DENIED = (
    "add_key", "keyctl", "request_key", "syslog", "uselib", "acct", "quotactl", "quotactl_fd",
    "move_pages", "mbind", "get_mempolicy", "set_mempolicy", "migrate_pages",
    "set_mempolicy_home_node", "unshare", "setns", "mount", "umount", "umount2", "pivot_root",
    "chroot", "ptrace", "perf_event_open", "bpf", "userfaultfd", "io_uring_setup",
    "io_uring_enter", "io_uring_register", "kexec_load", "kexec_file_load", "init_module",
    "finit_module", "delete_module", "create_module", "query_module", "get_kernel_syms",
    "reboot", "swapon", "swapoff", "settimeofday", "clock_settime", "clock_settime64",
    "clock_adjtime", "adjtimex", "stime", "open_by_handle_at", "name_to_handle_at",
    "lookup_dcookie", "nfsservctl", "vm86", "vm86old", "iopl", "ioperm", "kcmp",
    "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise", "vhangup",
    "sethostname", "setdomainname", "fanotify_init", "landlock_create_ruleset", "memfd_secret",
    "_sysctl", "sysfs", "ustat", "personality",
)  # fmt: skip
_MISSING = (
    "clone3", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "statmount", "listmount", "open_tree_attr",
)  # fmt: skip
"""Calls whose arguments a filter can't see, or that are new: programs do without where they are missing."""
_NEW_USER_NAMESPACE = 0x10000000
_TERMINAL_INPUT = (0x5412, 0x541C)
_FAMILIES = frozenset({1, 2, 10, 16})
"""Sockets of the machine itself, of IP in both versions, and of the kernel's network."""


class _Compared(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("one", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
    )


@lru_cache(maxsize=1)
def _filter() -> bytes:
    """Return the filter of calls as a program for the kernel, made by libseccomp for this machine.

    It denies what flatpak and Docker deny to programs of others, by the same groups: keys, namespaces,
    mounts, tracing, modules, clocks, foreign sockets, and input to a terminal.

    Raises:
        ConfigError: libseccomp is not there, or could not make it.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise ConfigError("libseccomp is not installed (`apt-get install libseccomp2`)") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def deny(name: str, error: int, *compared: _Compared) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:
            return  # unknown to this version
        array: Any = (_Compared * len(compared))(*compared)
        action = ctypes.c_uint32(_FAIL | error)
        if library.seccomp_rule_add_array(context, action, number, len(compared), array) < 0:
            raise ConfigError(f"libseccomp could not deny {name}")

    try:
        for name in _DENIED:
            deny(name, errno.EPERM)
        for name in _MISSING:
            deny(name, errno.ENOSYS)
        bits = _Compared(0, _HAS_BITS, _NEW_USER_NAMESPACE, _NEW_USER_NAMESPACE)
        deny("clone", errno.EPERM, bits)
        for request in _TERMINAL_INPUT:
            deny("ioctl", errno.EPERM, _Compared(1, _HAS_BITS, 0xFFFFFFFF, request))
        for family in range(max(_FAMILIES)):
            if family not in _FAMILIES:
                deny("socket", errno.EAFNOSUPPORT, _Compared(0, _EQUAL, family, 0))
        deny("socket", errno.EAFNOSUPPORT, _Compared(0, _AT_LEAST, max(_FAMILIES) + 1, 0))
        file = os.memfd_create("filter")
        try:
            if library.seccomp_export_bpf(context, file) < 0:
                raise ConfigError("libseccomp could not write its filter")
            return os.pread(file, 1 << 20, 0)
        finally:
            os.close(file)
    finally:
        library.seccomp_release(context)


def filter_file() -> IO[bytes]:
    """Return a file with the filter, in memory, at its beginning.

    Raises:
        ConfigError: libseccomp is not there, or could not make it.
    """
    file = os.fdopen(os.memfd_create("filter"), "w+b", buffering=0)
    file.write(_filter())
    file.seek(0)
    return file


_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
_JOIN = 1


def join_new_keyring() -> None:
    """Join a session keyring without keys, for this thread and what it starts.

    Where the machine does not let it, as in a container, the filter alone keeps keys away.
    """
    number = _KEYCTL.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(_JOIN), None)


_PAUSE_S = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watch:
    """Ends a box whose processes together use more memory, or whose files are larger, than they may."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        memory_bytes: int,
        disk_bytes: int,
        places: Sequence[str],
    ) -> None:
        """Set the limits; `places` are the mounts that can be written."""
        self._process = process
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._places = places
        self.has_stopped = False

    def run(self) -> None:
        """Look again and again, until the box has ended."""
        while self._process.poll() is None:
            pids = list(_below(self._process.pid))
            if self._is_too_much(pids):
                self.has_stopped = True
                self._process.kill()
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(_PAUSE_S)

    def _is_too_much(self, pids: list[int]) -> bool:
        memory = sum(map(_resident, pids))
        if memory > self._memory_bytes:
            memory = sum(map(_proportional, pids))  # what processes share counts once
        disk = sum(_used(pids[:2], place, self._disk_bytes) for place in self._places)
        return memory > self._memory_bytes or disk > self._disk_bytes


def _below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and theirs."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _below(int(child))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return _resident(pid)


def _used(pids: list[int], place: str, size: int) -> int:
    """Return how many bytes a mount of the box holds, seen by the first process that may be seen.

    A larger mount is one of this machine, which a process has as long as its box is being made.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            found = os.statvfs(f"/proc/{pid}/root{place}")
            if found.f_blocks * found.f_frsize <= size + _PAGE:
                return (found.f_blocks - found.f_bfree) * found.f_frsize
    return 0
