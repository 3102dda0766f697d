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
server = socket.socket(socket.AF_UNIX)
server.connect(where)
socket.send_fds(server, [len(told).to_bytes(8)], files)
server.sendall(told)
pid = int.from_bytes(server.recv(8, socket.MSG_WAITALL))
if not pid:
    os.execv(words[0], words)
with open("/proc/self/comm", "w") as name:  # noqa: PTH123 (for `fork_of`)
    name.write(str(pid))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int.from_bytes(server.recv(8, socket.MSG_WAITALL))
if os.WIFSIGNALED(status):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (number := os.WTERMSIG(status)) != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.waitstatus_to_exitcode(status))
