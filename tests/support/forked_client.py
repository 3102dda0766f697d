"""Ask the server of `forked` to run a command in a fork, and end as it does."""

import marshal
import os
import resource
import signal
import socket
import sys

where, children, *words = sys.argv[1:]


def is_handed_over(fd):
    try:
        return os.get_inheritable(fd)
    except OSError:  # that of the list itself
        return False


# pathlib takes as long to load as all the rest.
numbers = os.listdir("/proc/self/fd")  # noqa: PTH208
files = [fd for fd in map(int, numbers) if is_handed_over(fd)]
umask = os.umask(0o077)
os.umask(umask)
told = marshal.dumps(
    {
        "words": words,
        "children": children,
        "files": files,
        "folder": os.getcwd(),  # noqa: PTH109
        "variables": dict(os.environ),
        "umask": umask,
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
    }
)
pid, early = 0, []


def pass_on(number, _):
    if not pid:
        early.append(number)
        return
    try:  # noqa: SIM105 (contextlib is one more module to load)
        os.kill(pid, number)
    except ProcessLookupError:  # it has just ended, and its status is on the way
        pass


passed_on = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)
before = {number: signal.signal(number, pass_on) for number in passed_on}
server = socket.socket(socket.AF_UNIX)
server.connect(where)
socket.send_fds(server, [len(told).to_bytes(8)], files)
server.sendall(told)
pid = int.from_bytes(server.recv(8, socket.MSG_WAITALL))
if not pid:
    for number, handler in before.items():
        signal.signal(number, handler)
    os.execv(words[0], words)
for number in early:
    pass_on(number, None)
with open("/proc/self/comm", "w") as name:  # noqa: PTH123 (for `fork_of`)
    name.write(str(pid))
status = int.from_bytes(server.recv(8, socket.MSG_WAITALL))
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (number := os.WTERMSIG(status)) != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
