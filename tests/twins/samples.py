"""What each program is given to work on, and what is left out and why.

Operands are inside the throw-away folder, always. Where a program has no entry here, it works on
`OPERANDS` with `VALUES`.
"""

from dataclasses import dataclass, field

OPERANDS = (
    ("a.txt",),
    ("b.txt",),
    ("a.txt", "b.txt"),
    ("d/x.txt",),
    ("long.txt", "numbers.txt"),
    ("with space.txt", "a.txt"),
    ("missing.txt", "a.txt"),
    ("-",),
    (),
)
PAIRS = (("a.txt", "b.txt"), ("s.txt", "t.txt"), ("d", "e2"), ("a.txt", "a.txt"), ("-", "s.txt"))
VALUES = ("1", "2", "3", "10")
STDIN = "apple 3\nfig 2\n\napple 3\nBanana\n"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one program is given."""

    operands: tuple[tuple[str, ...], ...] = OPERANDS
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By option id."""
    stdin: str = STDIN
    kind: str = "plain"
    always: tuple[str, ...] = ()
    """Words right behind the program's name in every command."""
    without: dict[str, str] = field(default_factory=dict)
    """Options that are left out, and why."""
    echoes: str = "$^"
    """Pattern of lines that repeat the command as it was spelled, or tell the time it took."""
    commands: tuple[str, ...] = ()
    """Whole commands, whose words change places, for a program that has no table of options."""


NOT_RUN = {
    "lsof": "shows other processes",
    "df": "free space changes",
    "sudo": "changes the user",
    "nohup, npx, bunx": "npx and bunx install packages",
    "uv run": "installs packages",
    "poetry run": "installs packages",
    "pdm run": "installs packages",
    "hatch run": "installs packages",
    "ruff check": "not on every machine",
    "ruff format": "not on every machine",
    "black": "not on every machine",
    "mypy": "not on every machine",
    "pytest, py.test": "not on every machine",
    "node": "no options are known",
    "git fetch": "needs a remote",
    "git push": "needs a remote",
    "git pull": "needs a remote",
    "shuf": "random",
    "curl": "needs a server",
    "go test": "not on every machine",
    "go build": "not on every machine",
    "go vet": "not on every machine",
    "go list": "not on every machine",
    "go install": "not on every machine",
    "go doc": "not on every machine",
    "go clean": "not on every machine",
    "gofmt": "not on every machine",
    "golangci-lint run": "not on every machine",
    "gh pr view, gh issue view": "not on every machine",
    "gh pr list, gh issue list": "not on every machine",
    "gh pr diff": "not on every machine",
    "gh pr checks": "not on every machine",
    "gh pr create": "not on every machine",
    "gh pr edit, gh issue edit": "not on every machine",
    "gh run view": "not on every machine",
    "gh run list": "not on every machine",
    "gh repo view": "not on every machine",
    "gh api": "not on every machine",
    "docker ps": "needs a daemon",
    "docker images": "needs a daemon",
    "docker logs": "needs a daemon",
    "docker inspect": "needs a daemon",
    "docker exec": "needs a daemon",
    "docker run": "needs a daemon",
    "docker build": "needs a daemon",
    "docker stop, docker restart": "needs a daemon",
    "docker compose ps": "needs a daemon",
    "docker compose logs": "needs a daemon",
    "docker compose up": "needs a daemon",
    "docker compose down": "needs a daemon",
    "docker compose build": "needs a daemon",
    "kubectl get": "needs a daemon",
    "kubectl describe": "needs a daemon",
    "kubectl logs": "needs a daemon",
    "kubectl delete": "needs a daemon",
    "kubectl apply": "needs a daemon",
    "kubectl rollout": "needs a daemon",
    "cargo build, cargo check, cargo clippy, cargo test, cargo doc": "not on every machine",
    "cargo fmt": "not on every machine",
    "npm install, npm ci, npm uninstall": "installs packages",
    "npm i": "installs packages",
    "npm ls, npm list, npm outdated": "installs packages",
    "pnpm add, pnpm install, pnpm i, pnpm remove": "installs packages",
    "yarn add, yarn remove": "installs packages",
    "pip install, pip3 install": "installs packages",
    "pip show, pip list, pip freeze, pip3 show, pip3 list, pip3 freeze": "installs packages",
    "terraform plan, terraform apply": "not on every machine",
    "pgrep": "shows other processes",
    "go, npm, pnpm, yarn, bun, pip, pip3, docker, podman, kubectl, cargo, gh, wget, helm": "no "
    "options are known",
}
"""Tables of the data file that are not executed, and why."""

SIZES = ("1", "1024", "K", "1M")
SUMS = Sample(
    operands=(("a.txt",), ("a.txt", "b.txt"), ("sums.md5",), ("s.txt",), ("missing.txt",), ("-",)),
    values={"length": ("8", "128")},
)
GREP = Sample(
    operands=(
        ("apple", "a.txt"),
        ("apple", "a.txt", "b.txt"),
        ("a", "d"),
        ("APPLE", "a.txt", "d/x.txt"),
        ("apple", "d", "e2"),
        ("a.p", "a.txt", "missing.txt"),
        ("app", "bytes.bin", "a.txt"),
        ("apple",),
        ("apple", "-"),
        ("d/x", "d/x.txt"),
        ("a.txt", "b.txt"),
    ),
    values={
        "regexp": ("apple", "fig", "a."),
        "file": ("patterns.txt",),
        "include": ("*.txt", "x*"),
        "exclude": ("*.log", "x*", "*.txt"),
        "exclude-dir": ("sub",),
        "exclude-from": ("patterns.txt",),
        "binary-files": ("text", "without-match"),
        "directories": ("skip", "recurse", "read"),
        "devices": ("skip", "read"),
        "color": ("always", "never", "auto"),
        "label": ("here",),
        "group-separator": ("##",),
    },
)
DATES = ("2020-01-15", "2020-03-01", "yesterday")
REVISIONS = ((), ("main",), ("side",), ("v1..main",), ("--", "d"), ("HEAD", "--", "a.txt"), ("v2",))
DIFF_VALUES = {
    "unified": ("0", "1"),
    "stat": ("60",),
    "S": ("more", "x"),
    "G": ("line", "more"),
    "diff-filter": ("M", "AM", "D"),
    "find-renames": ("50%",),
    "find-copies": ("50%",),
    "word-diff": ("plain", "color"),
    "color": ("always", "never"),
    "abbrev": ("8",),
    "relative": ("d",),
    "pretty": ("oneline", "short", "%h %s"),
    "format": ("%h", "%an %s", "fuller"),
    "decorate": ("short", "full"),
    "date": ("iso", "short", "unix"),
    "since": DATES,
    "until": DATES,
    "author": ("Ada", "Bob"),
    "grep": ("more", "FRUIT"),
    "max-count": ("1", "3", "5"),
    "skip": ("1", "2"),
}


def _git(*operands: tuple[str, ...], **more: object) -> Sample:
    return Sample(kind="repository", operands=operands or ((),), stdin="y\nn\nq\n", **more)


SAMPLES = {
    "ls": Sample(
        operands=((), ("d",), ("a.txt", "d"), (".",), ("d", "e2"), ("link",), ("missing", "d")),
        values={
            "block-size": SIZES,
            "color": ("always", "never"),
            "classify": ("always", "never"),
            "format": ("long", "commas", "single-column", "across", "verbose"),
            "hide": ("*.txt", "d*"),
            "ignore": ("*.log", "a*"),
            "indicator-style": ("slash", "none", "file-type", "classify"),
            "quoting-style": ("c", "shell", "escape", "literal"),
            "sort": ("size", "time", "none", "extension", "version"),
            "time": ("atime", "ctime", "mtime"),
            "time-style": ("iso", "long-iso", "+%Y"),
            "width": ("20", "40", "0"),
            "tabsize": ("0", "4"),
        },
    ),
    "cat": Sample(operands=(*OPERANDS, ("crlf.txt", "bytes.bin"))),
    "tac": Sample(values={"separator": ("a", "\\n", "p*")}),
    "head": Sample(
        operands=(*OPERANDS, ("zeros.txt",)),
        values={"lines": ("1", "2", "-1", "5"), "bytes": ("3", "-4", "1K")},
    ),
    "tail": Sample(
        operands=(*OPERANDS, ("zeros.txt",)),
        values={"lines": ("1", "2", "+2", "5"), "bytes": ("3", "+4", "1K")},
        without={
            "follow": "never ends",
            "F": "never ends",
            "retry": "only with --follow",
            "pid": "only with --follow",
            "sleep-interval": "only with --follow",
            "max-unchanged-stats": "only with --follow",
        },
    ),
    "wc": Sample(values={"files0-from": ("-", "missing.txt")}),
    "nl": Sample(
        values={
            "body-numbering": ("a", "t", "n", "pa"),
            "header-numbering": ("a", "n"),
            "footer-numbering": ("a", "n"),
            "number-format": ("ln", "rn", "rz"),
            "number-separator": (":", "  "),
            "section-delimiter": ("a", "ab"),
        }
    ),
    "od": Sample(
        values={
            "address-radix": ("x", "d", "n"),
            "format": ("x1", "c", "d2", "a"),
            "read-bytes": ("8", "20"),
            "skip-bytes": ("2", "5"),
            "strings": ("4",),
            "width": ("8", "4"),
        }
    ),
    "stat": Sample(
        operands=(("a.txt",), ("d",), ("link",), ("a.txt", "d"), ("missing", "a.txt")),
        values={"format": ("%n %s", "%a %F"), "printf": ("%n\\n", "%s ")},
        without={"file-system": "free space changes"},
    ),
    "file": Sample(
        operands=(("a.txt",), ("bytes.bin", "d"), ("link",), ("long.txt.gz",), ("missing",)),
        values={"exclude": ("text",), "separator": ("@", " ->"), "magic-file": ("missing",)},
    ),
    "du": Sample(
        operands=(("d",), ("d", "e2"), (".",), ("a.txt",), ("folder link",), ("missing", "d")),
        values={
            "block-size": SIZES,
            "max-depth": ("0", "1"),
            "threshold": ("1", "-1000", "5000"),
            "exclude": ("*.txt", "sub"),
        },
    ),
    "tree": Sample(
        operands=((), ("d",), ("d", "e2")),
        values={"L": ("1", "2"), "P": ("*.txt",), "I": ("sub", "*.log")},
        without=dict.fromkeys("AS", "lines drawn with letters hide where a path begins"),
    ),
    "readlink": Sample(
        operands=(("link",), ("broken",), ("a.txt",), ("link", "folder link"), ("missing/x",))
    ),
    "realpath": Sample(
        operands=(("link",), ("broken",), ("d/sub",), ("link", "d/../a.txt"), ("missing/x",)),
        values={"relative-to": ("d", "."), "relative-base": (".", "d")},
    ),
    "sort": Sample(
        operands=(*OPERANDS, ("numbers.txt",), ("s.txt", "t.txt"), ("zeros.txt",)),
        values={
            "key": ("2", "1,1", "2n", "2,2r", "1.2"),
            "field-separator": (" ", "a", ","),
            "output": ("out.txt", "b.txt"),
            "sort": ("numeric", "version", "month", "general-numeric", "human-numeric"),
            "check": ("quiet", "silent", "diagnose-first"),
            "buffer-size": ("1M",),
            "temporary-directory": (".", "empty"),
            "parallel": ("1", "2"),
        },
    ),
    "uniq": Sample(
        operands=(("a.txt",), ("b.txt",), ("long.txt",), (), ("a.txt", "out.txt"), ("zeros.txt",)),
        values={"all-repeated": ("none", "prepend", "separate"), "group": ("prepend", "both")},
    ),
    "cut": Sample(
        operands=(*OPERANDS, ("table.csv",)),
        values={
            "fields": ("1", "2", "1-2", "2-"),
            "bytes": ("1", "2-4", "1,3"),
            "characters": ("1-3", "2"),
            "delimiter": (",", " ", "l"),
            "output-delimiter": (":", ""),
        },
    ),
    "paste": Sample(operands=(*PAIRS, ("a.txt",), ()), values={"delimiters": (",", ":;")}),
    "join": Sample(
        operands=PAIRS,
        values={
            "a": ("1", "2"),
            "v": ("1", "2"),
            "1": ("1", "2"),
            "2": ("1", "2"),
            "j": ("1", "2"),
            "e": ("-", "none"),
            "o": ("1.2,2.2", "0", "auto"),
            "t": (" ", ","),
        },
    ),
    "comm": Sample(operands=PAIRS, values={"output-delimiter": (",", ";")}),
    "tr": Sample(
        operands=(("a", "b"), ("a-z", "A-Z"), ("a",), ("[:space:]", "x"), ("ab", "x"), ("-a", "b"))
    ),
    "fold": Sample(values={"width": ("5", "20")}, operands=(*OPERANDS, ("words.txt",))),
    "fmt": Sample(
        values={"width": ("20", "40"), "goal": ("15", "30"), "prefix": ("a", ">")},
        operands=(*OPERANDS, ("words.txt",)),
    ),
    "expand": Sample(values={"tabs": ("2", "1,5", "4")}),
    "unexpand": Sample(values={"tabs": ("2", "1,5", "4")}),
    "column": Sample(
        operands=(("a.txt",), ("table.csv",), ()),
        values={
            "separator": (",", " "),
            "output-separator": ("|", "  "),
            "table-columns": ("x,y,z",),
            "table-right": ("1", "2"),
            "output-width": ("30", "60"),
        },
    ),
    "tsort": Sample(operands=(("s.txt",), ("b.txt",), ())),
    "numfmt": Sample(
        operands=(("1000",), ("1K", "2M"), ("-5",), ("12345", "x"), ()),
        values={
            "to": ("si", "iec", "none"),
            "from": ("si", "iec", "auto", "none"),
            "padding": ("10", "-10"),
            "format": ("%f", "%010f"),
            "round": ("up", "down"),
            "suffix": ("B",),
            "invalid": ("warn", "ignore", "fail"),
            "field": ("1", "2"),
            "delimiter": (",", " "),
        },
        stdin="1000 2000\n3K\n",
    ),
    "md5sum, sha1sum, sha224sum, sha256sum, sha384sum, sha512sum": SUMS,
    "b2sum": SUMS,
    "cksum": Sample(
        operands=SUMS.operands,
        values={"length": ("8", "128"), "algorithm": ("md5", "crc", "blake2b", "sysv")},
    ),
    "base64, base32": Sample(
        operands=(("a.txt",), ("text.b64",), ("-",), (), ("missing.txt",)),
        values={"wrap": ("0", "8")},
    ),
    "grep, egrep, fgrep": GREP,
    "rg": Sample(
        operands=GREP.operands[:-3] + (("apple", "."),),
        values=GREP.values
        | {
            "glob": ("*.txt", "!*.log", "!d", "*.LOG"),
            "iglob": ("*.TXT", "!*.LOG"),
            "type": ("txt", "md", "all"),
            "type-not": ("txt", "make"),
            "sort": ("path", "none"),
            "sortr": ("path",),
            "color": ("always", "never"),
            "engine": ("default", "auto"),
            "encoding": ("utf-8", "none"),
            "replace": ("PEAR", "$0$0"),
            "max-depth": ("1", "2"),
            "max-columns": ("5", "80"),
        },
        always=("-j1",),
        without={
            "stats": "shows the time taken",
            "json": "shows the time taken",
            "threads": "files would come in any order",
        },
    ),
    "sed": Sample(
        operands=(
            ("s/a/X/", "a.txt"),
            ("2d", "a.txt", "b.txt"),
            ("-n", "a.txt"),
            ("$p", "b.txt", "a.txt"),
            ("s/(a|b)+/[&]/g", "b.txt"),
            ("p",),
            ("a.txt",),
            ("s/a/X/w out.txt", "b.txt"),
        ),
        values={
            "expression": ("p", "s/a/b/", "s/b/c/", "1d", "$d"),
            "file": ("script.sed",),
            "in-place": (".bak", ".old"),
            "line-length": ("5", "20"),
        },
    ),
    "diff": Sample(
        echoes="diff ",
        operands=(*PAIRS, ("e2", "d"), ("a.txt", "missing"), ("crlf.txt", "a.txt")),
        values={
            "context": ("1", "0"),
            "unified": ("1", "0"),
            "width": ("40", "60"),
            "show-function-line": ("a", "d"),
            "label": ("one", "two"),
            "tabsize": ("4",),
            "exclude": ("*.log", "x*"),
            "exclude-from": ("patterns.txt",),
            "starting-file": ("x.txt",),
            "ignore-matching-lines": ("apple", "fig"),
            "ifdef": ("X", "Y"),
            "color": ("always", "never"),
        },
    ),
    "cmp": Sample(operands=PAIRS, values={"ignore-initial": ("2", "1:3"), "bytes": ("3", "20")}),
    "mkdir": Sample(
        operands=(("new",), ("new/deep/er",), ("d", "new"), ("new/", "empty/x"), ("a.txt/x",)),
        values={"mode": ("700", "u=rwx,go=", "a-w")},
    ),
    "rmdir": Sample(operands=(("empty",), ("d",), ("missing",), ("d/sub", "empty"))),
    "touch": Sample(
        operands=(("a.txt",), ("new.txt",), ("a.txt", "new.txt"), ("link",), ("broken",)),
        values={
            "date": ("2021-05-05", "2020-01-01 10:00", "@86400"),
            "reference": ("b.txt", "missing"),
            "t": ("202105050505", "202006060606"),
            "time": ("access", "modify", "atime"),
        },
    ),
    "rm": Sample(
        operands=(
            ("a.txt",),
            ("d",),
            ("locked.txt",),
            ("missing", "b.txt"),
            ("empty",),
            ("link", "d/x.txt"),
            ("a.txt", "b.txt", "s.txt", "t.txt"),
            ("d", "e2"),
        ),
        values={"interactive": ("never", "once", "always"), "preserve-root": ("all",)},
        stdin="y\nn\ny\n",
    ),
    "cp": Sample(
        operands=(
            ("a.txt", "new.txt"),
            ("a.txt", "b.txt"),
            ("a.txt", "b.txt", "empty"),
            ("d", "new"),
            ("d", "e2"),
            ("link", "new.txt"),
            ("a.txt", "locked.txt"),
            ("d/", "empty"),
            ("folder link", "new"),
            ("a.txt", "link"),
        ),
        values={
            "backup": ("numbered", "simple", "none"),
            "preserve": ("mode", "timestamps", "all", "links"),
            "no-preserve": ("mode", "timestamps", "all"),
            "suffix": (".old", "~~"),
            "target-directory": ("empty", "d", "missing"),
        },
        stdin="y\nn\ny\n",
    ),
    "mv": Sample(
        operands=(
            ("a.txt", "new.txt"),
            ("a.txt", "b.txt"),
            ("a.txt", "b.txt", "empty"),
            ("d", "new"),
            ("d", "empty"),
            ("a.txt", "locked.txt"),
            ("link", "d"),
            ("d/", "new/"),
        ),
        values={
            "backup": ("numbered", "simple", "none"),
            "suffix": (".old", "~~"),
            "target-directory": ("empty", "d", "missing"),
        },
        stdin="y\nn\ny\n",
    ),
    "ln": Sample(
        operands=(("a.txt", "new"), ("a.txt", "b.txt"), ("d", "new"), ("link", "new"), ("d/x.txt",))
        + (("a.txt", "folder link"), ("a.txt", "b.txt", "empty"), ("./a.txt", "d/sub")),
        values={
            "backup": ("numbered", "simple"),
            "suffix": (".old",),
            "target-directory": ("empty", "d"),
        },
        stdin="y\nn\n",
    ),
    "chmod": Sample(
        operands=(
            ("600", "a.txt"),
            ("u+x", "a.txt", "b.txt"),
            ("-w", "a.txt"),
            ("go-r", "d"),
            ("+x", "missing", "a.txt"),
            ("a.txt", "b.txt"),
        ),
        values={"reference": ("run.sh", "locked.txt")},
    ),
    "tee": Sample(
        operands=(("out.txt",), ("a.txt",), ("a.txt", "out.txt"), (), ("locked.txt",), ("d",)),
        values={"output-error": ("warn", "exit")},
    ),
    "truncate": Sample(
        operands=(("a.txt",), ("new.txt",), ("a.txt", "b.txt"), ("d",)),
        values={"size": ("5", "+3", "%4", "0", "<3"), "reference": ("b.txt", "missing")},
    ),
    "split": Sample(
        operands=(("long.txt",), ("long.txt", "part."), ("-", "p"), (), ("a.txt", "d/p")),
        values={
            "lines": ("5", "10"),
            "bytes": ("20", "100"),
            "line-bytes": ("30",),
            "number": ("3", "l/2"),
            "suffix-length": ("1", "3"),
            "additional-suffix": (".txt", ".x"),
            "numeric-suffixes": ("5",),
            "hex-suffixes": ("9",),
            "separator": ("n", "\\0"),
        },
    ),
    "gzip, gunzip, zcat": Sample(
        operands=(("a.txt",), ("long.txt.gz",), ("a.txt", "b.txt"), ("d",), ("-",), ("missing",)),
        values={"suffix": (".z", ".gz")},
        without={"list": "shows the time of its run for standard input"},
    ),
    "date": Sample(
        operands=((), ("+%Y",), ("+%s %Z",)),
        values={
            "date": ("@0", "2020-01-01 10:00", "2020-02-30"),
            "file": ("s.txt",),
            "iso-8601": ("seconds", "date"),
            "rfc-3339": ("date", "ns"),
            "reference": ("a.txt", "missing"),
        },
        always=("-d@86400",),
    ),
    "uname": Sample(operands=((), ("x",))),
    "id": Sample(operands=((), ("root",), ("nobody",))),
    "nproc": Sample(operands=((), ("x",))),
    "whoami, tty, arch, hostid, logname": Sample(operands=((), ("x",))),
    "pwd": Sample(operands=((), ("x",))),
    "printenv": Sample(operands=(("TZ",), ("HOME", "TZ"), ("MISSING",), ("TZ", "-0"))),
    "which": Sample(operands=(("ls",), ("ls", "cat"), ("missing", "ls"))),
    "time": Sample(
        echoes="(real|user|sys)\\s",
        operands=(("true",), ("ls", "-l", "-a", "d")),
        without={"v": "no bash option"},
    ),
    "nice": Sample(
        operands=(("ls", "-a", "d"), ("head", "-n", "1", "a.txt"), ("nice",)),
        values={"adjustment": ("5", "1")},
    ),
    "timeout": Sample(
        operands=(
            ("5", "ls", "-a", "d"),
            ("5", "head", "-q", "-n1", "a.txt"),
            ("0.05", "sleep", "3"),
            ("5", "sh", "-c", "exit 3"),
        ),
        values={"signal": ("KILL", "INT"), "kill-after": ("3", "1")},
    ),
    "python -m": Sample(operands=(("this",), ("base64", "-e", "a.txt"), ("json.tool", "a.txt"))),
    "python3 -m": Sample(operands=(("this",), ("base64", "-e", "a.txt"), ("json.tool", "a.txt"))),
    "python, python3": Sample(
        operands=(("run.py", "x"), ("run.py", "-v", "-O"), ("missing.py",)),
        values={"W": ("ignore", "error"), "X": ("utf8", "dev")},
        without={"v": "shows addresses", "d": "shows addresses", "x": "", "i": "reads on"},
    ),
    "bash, sh, zsh": Sample(operands=(("run.sh", "x"), ("run.sh", "-x", "-e"), ("missing",))),
    "source, .": Sample(operands=(("run.sh",), ("run.sh", "-x"), ("d/x.txt",), ("missing",))),
    "make": Sample(
        operands=((), ("x",), ("y", "x"), ("all",), ("fail",), ("fail", "y"), ("V=2", "x"), ("d",)),
        values={
            "directory": ("d", "."),
            "file": ("Makefile", "missing"),
            "include-dir": ("d",),
            "jobs": ("1",),
            "old-file": ("x",),
            "what-if": ("x",),
            "l": ("2",),
        },
        without={"d": "shows the time", "print-data-base": "shows the time"},
    ),
    "git status": _git(
        (),
        ("--", "d"),
        ("d",),
        ("a.txt",),
        values={
            "porcelain": ("v1", "v2"),
            "untracked-files": ("no", "all", "normal"),
            "ignored": ("traditional", "matching", "no"),
            "ignore-submodules": ("all", "none"),
            "column": ("always", "never"),
            "find-renames": ("50%",),
        },
    ),
    "git diff": _git(
        (),
        ("HEAD",),
        ("v1", "main"),
        ("main..side",),
        ("--", "d"),
        ("HEAD", "--", "a.txt"),
        ("HEAD", "--", "./a.txt"),
        values=DIFF_VALUES,
    ),
    "git log": _git(*REVISIONS, ("main", "side"), ("side", "--", "d", "a.txt"), values=DIFF_VALUES),
    "git show": _git(
        *REVISIONS[:3],
        ("v1",),
        ("v2", "side"),
        ("HEAD~1", "--", "d"),
        ("HEAD:a.txt",),
        values=DIFF_VALUES,
    ),
    "git add": _git(
        ("a.txt",),
        ("d",),
        (".",),
        (),
        ("d/y.log",),
        ("missing", "a.txt"),
        without={"edit": "opens an editor"},
    ),
    "git commit": _git(
        (),
        ("a.txt",),
        ("--", "d"),
        ("--", "./a.txt"),
        values={
            "message": ("one", "two", ""),
            "file": ("s.txt",),
            "author": ("Bob <b@example.org>",),
            "date": ("2021-01-01T00:00:00Z",),
            "reuse-message": ("HEAD", "v1"),
            "reedit-message": ("HEAD", "v1"),
            "template": ("s.txt",),
            "cleanup": ("verbatim", "strip"),
            "untracked-files": ("no", "all"),
        },
        without={
            "gpg-sign": "needs a key",
            "no-gpg-sign": "needs a key",
            "reset-author": "takes the time",
        },
    ),
    "git branch": _git(
        (),
        ("new",),
        ("side",),
        ("new", "v1"),
        ("side", "new"),
        ("main",),
        ("v*",),
        values={
            "set-upstream-to": ("side", "missing"),
            "contains": ("v1", "side"),
            "no-contains": ("side",),
            "merged": ("main", "side"),
            "no-merged": ("main",),
            "sort": ("-refname", "objectsize"),
            "format": ("%(refname)",),
            "abbrev": ("5",),
            "color": ("always", "never"),
        },
    ),
    "git ls-files": _git(
        (),
        ("d",),
        ("a.txt",),
        ("missing",),
        values={
            "exclude": ("*.log", "*.txt"),
            "exclude-from": (".gitignore",),
            "abbrev": ("5",),
        },
    ),
    "git checkout": _git(
        ("side",),
        ("-",),
        ("--", "a.txt"),
        ("--", "./a.txt", "d"),
        ("v1",),
        ("v1", "--", "d"),
        ("a.txt",),
        ("missing",),
        values={
            "b": ("new", "side"),
            "B": ("new", "side"),
            "orphan": ("bare",),
            "conflict": ("merge", "diff3"),
            "track": ("direct",),
        },
    ),
    "git switch": _git(
        ("side",),
        ("-",),
        ("v1",),
        ("missing",),
        ("main",),
        values={
            "create": ("new", "side"),
            "force-create": ("new", "side"),
            "orphan": ("bare",),
            "conflict": ("merge", "diff3"),
            "track": ("direct",),
        },
    ),
    "git restore": _git(
        ("a.txt",),
        ("d",),
        (".",),
        ("missing", "a.txt"),
        values={
            "source": ("v1", "HEAD~1", "side"),
            "conflict": ("merge", "diff3"),
        },
    ),
    "git reset": _git((), ("v1",), ("HEAD~1",), ("--", "d"), ("HEAD", "--", "d/x.txt"), ("d",)),
    "git rm": _git(("long.txt",), ("d",), ("a.txt",), ("missing", "long.txt"), ("--", "long.txt")),
    "git mv": _git(
        ("long.txt", "new.txt"),
        ("d", "new"),
        ("a.txt", "long.txt"),
        ("missing", "new"),
        ("long.txt", "a.txt", "e2"),
    ),
    "git tag": _git(
        (),
        ("new",),
        ("v1",),
        ("new", "v1"),
        ("v*",),
        values={
            "n": ("1", "2"),
            "message": ("one", "two"),
            "file": ("s.txt",),
            "cleanup": ("verbatim", "strip"),
            "contains": ("v1", "side"),
            "no-contains": ("side",),
            "sort": ("-refname",),
            "points-at": ("v2", "HEAD"),
            "format": ("%(refname)",),
            "color": ("always", "never"),
        },
    ),
    "git blame": _git(
        ("a.txt",),
        ("long.txt",),
        ("v1", "--", "a.txt"),
        ("missing",),
        values={
            "L": ("1,2", "2,+1"),
            "abbrev": ("8",),
        },
    ),
    "git grep": _git(
        ("apple",),
        ("line", "v1"),
        ("apple", "--", "d"),
        ("APPLE", "--", "a.txt"),
        ("a.p",),
        values={"max-depth": ("0", "1"), "color": ("always", "never")},
    ),
    "git rev-list": _git(
        ("main",), ("side", "main"), ("v1..main",), ("main", "--", "d"), values=DIFF_VALUES
    ),
    "git shortlog": _git(("main",), ("v1..side",), ("main", "side")),
    "git describe": _git(
        (),
        ("side",),
        ("HEAD~1",),
        ("v1",),
        values={
            "abbrev": ("0", "5"),
            "candidates": ("0", "1"),
            "match": ("v*", "v1"),
            "exclude": ("v2", "v1"),
            "dirty": ("-x",),
        },
    ),
    "git ls-tree": _git(("HEAD",), ("v1", "d"), ("side", "d/"), values={"abbrev": ("5",)}),
    "git cat-file": _git(("HEAD",), ("v1:a.txt",), ("commit", "HEAD"), ("missing",)),
    "git show-ref": _git(
        (),
        ("main",),
        ("refs/heads/main",),
        ("v1", "side"),
        values={"hash": ("6",), "abbrev": ("7",)},
    ),
    "git merge-base": _git(("main", "side"), ("v1", "HEAD"), ("main", "side", "v1"), ("v1",)),
    "git check-ignore": _git(("a.txt",), ("x.log", "a.txt"), ("d/x.txt", "missing.log")),
    "git remote": _git((), ("show",)),
    "git clean": _git(
        (),
        ("d",),
        (".",),
        ("missing",),
        values={"exclude": ("*.txt", "d")},
        without={"interactive": "asks"},
    ),
    "git merge": _git(
        ("side",),
        ("v1",),
        ("missing",),
        ("HEAD",),
        values={
            "strategy": ("ours", "ort"),
            "strategy-option": ("theirs", "ours"),
            "message": ("one", "two"),
            "file": ("s.txt",),
        },
    ),
    # Without a table of options: whole commands, whose words change places.
    "find": Sample(
        commands=(
            "find d -name x.txt",
            "find ./d -name *.txt -type f",
            "find . -type f -name *.log",
            "find d e2 -maxdepth 1 -name x.txt",
            "find d -not -empty -name *.txt",
            "find d ( -name x.txt -o -name y.log ) -print",
            "find d -name x.txt -exec echo {} ;",
            "find d -name *.txt -exec grep apple {} +",
            "find -L d -type f -print0",
            "find d -path d/sub -prune -o -print",
            "find ./d -path ./d/x.txt",
            "find d -name x.txt -delete",
            "find d -printf %p\\n",
            "find ./d -newer a.txt",
        )
    ),
    "echo, printf, expr, test, [, kill, true, false, sleep, seq, yes, factor, export, declare, set, "
    "read": Sample(
        commands=(
            "echo -n -e a\\tb",
            "echo -e -n -E a\\tb",
            "echo -x -n b",
            "echo --one --two",
            "echo ./a a",
            "printf -- %s\\n a b",
            "printf %s --b --a",
            "printf %s,%s -x -a",
            "expr 3 - 5",
            "expr 2 + -3",
            "test -n -a",
            "test -e a.txt -a -d d",
            "[ -f a.txt -o -z x ]",
            "kill -l 9 15",
            "kill -l TERM",
            "seq -5 -1",
            "seq -1 -2 -5",
            "seq -w -s , 3",
            "seq -s , -w 3 8",
            "factor 12 -- 15",
            "true --x --a",
            "sleep 0 0.001",
        )
    ),
    "env, xargs, watch, parallel, ssh, scp": Sample(
        commands=(
            "xargs -n 1 echo -n",
            "xargs -t -r echo",
            "xargs echo --b --a",
            "xargs -I {} echo {} x",
            "env A=1 B=2 printenv A B",
            "env -i A=1 printenv",
            "env -u TZ printenv TZ HOME",
        )
    ),
    "tar, zip, unzip, rsync, patch, dd, find2perl, cpio, install, pax": Sample(
        commands=(
            "tar -tf data.tar",
            "tar -cf - d s.txt",
            "tar -cf new.tar ./d",
            "tar -x -f data.tar -C empty",
            "tar -xvf data.tar --strip-components=1 -C empty",
            "tar -tvf data.tar d/x.txt",
            "tar -cf new.tar --exclude=*.log --exclude=x* d",
            "dd if=a.txt bs=2 count=3 status=none",
            "install -m 700 a.txt new.txt",
            "install -d -v new1 ./new2",
        )
    ),
    "awk, gawk, mawk": Sample(
        commands=(
            "awk {print$1} a.txt",
            "awk -F a {print$1} a.txt b.txt",
            "awk -v x=1 -v y=2 {print(x-y)} s.txt",
            "awk -f script.sed ./a.txt",
        )
    ),
    "basename, dirname": Sample(
        commands=(
            "basename d/x.txt .txt",
            "basename -a d/x.txt ./b.txt",
            "basename -s .txt -a d/x.txt",
            "dirname d/x.txt ./b.txt",
            "dirname -z d/x.txt",
        )
    ),
    "ruby, perl, psql, mysql, sqlite3, bc": Sample(
        commands=(
            "perl -n -e print a.txt",
            "perl -pe s/a/b/ ./a.txt",
            "perl -e print(@ARGV) -- --b --a",
        )
    ),
    "jq": Sample(
        operands=(
            (".",),
            (".", "-"),
            ("length",),
            (".b", "-"),
            (".", "missing.txt"),
            (".", "a.txt"),
        ),
        stdin='{"b": "ä", "a": [1, 2]}\n{"b": null}\n',
    ),
    "xxd, hexdump": Sample(commands=("hexdump -C a.txt", "hexdump -n 8 -C ./a.txt")),
    "less, more": Sample(commands=("more a.txt", "more -2 ./a.txt")),
    "fd, fdfind, ag, ack": Sample(commands=("fdfind x d", "fdfind -e txt -H . d", "fdfind . ./d")),
    "git stash": Sample(
        kind="repository",
        commands=(
            "git stash list",
            "git stash show -p --stat",
            "git stash push -q -m x",
            "git stash pop --index -q",
        ),
    ),
    "gcc, g++, cc, c++, clang, clang++, ld, ffmpeg, convert, magick, git": Sample(
        kind="repository",
        commands=(
            "git -C d status --short",
            "git rev-parse --short HEAD",
            "git rev-parse --verify --quiet side",
            "git config --get user.name",
            "git remote -v",
            "git -c core.abbrev=5 log --oneline",
            "git --no-pager diff --stat",
            "git rev-parse --show-toplevel --show-prefix",
            "git worktree list --porcelain",
            "git reflog -n 2",
        ),
    ),
}
