"""The consequences of an action: none, bookkeeping, a change here, or something that a person should decide.

One table, `consequences.toml`, tells it of commands of every shell, of statements and code that are
handed to a program, and of tools by their names, arguments and annotations. In doubt, a command changes
something here, and a tool of a server may change something elsewhere.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple

import msgspec

_MAX_NAME_WORDS = 3
_PRINTS_LINES = re.compile(r"[\d$,;pq{} ]+|s(\W)(?:(?!\1).)*\1(?:(?!\1).)*\1[gIip\d]*", re.DOTALL)
"""Scripts of `sed` that print; others can write files."""
_AWK_WRITES = re.compile(r">|\||system|getline|close|printf?\s*\(?.*>")
_VALUED_BY_XARGS = frozenset({"-I", "-n", "-P", "-L", "-d", "-E", "-s", "-a"})


_WRAPPERS = frozenset({"command", "exec", "env", "builtin", "setsid"})
"""Programs that run another one as it is; `sudo`, `timeout` and the like are read elsewhere."""
_GIT_VALUED = frozenset({"-C", "-c", "--git-dir", "--work-tree", "--namespace"})
"""Options of `git` itself, before what it is to do, that take the next word."""
_BIN = re.compile(r"/(?:usr/)?(?:local/)?s?bin/(?=[\w.-]+$)")
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_A_FILE = re.compile(r"\.$|.*\.[A-Za-z]\w{0,5}$|.*/$")
"""What `git checkout` takes for a file rather than a branch."""
_LOCAL = re.compile(
    r"(?:https?://)?(?:localhost|127\.|0\.0\.0\.0|\[::1?\]|[^/.:]+(?::\d+)?(?:/|$))"
)
_SENDS = frozenset({"POST", "PUT", "PATCH", "DELETE"})


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    looks: dict[str, str]
    keeps: dict[str, str]
    acts: dict[str, str]
    verbs: dict[str, str]
    things: dict[str, str]
    clouds: dict[str, str]
    scripts: dict[str, int]
    sql: dict[str, str]
    local: dict[str, str]
    tools: dict[str, str]


class Consequence(NamedTuple):
    """The effect of a command: whether it changes anything, and how."""

    only_looks: bool = False
    """Whether it changes nothing."""
    acts: frozenset[str] = frozenset()
    """Kinds of consequences that a person must ask for, such as `push`."""
    keeps_files: bool = False
    """Whether it leaves source files alone: it looks, builds, tests, or commits."""
    is_note: bool = False
    """Whether it is bookkeeping: a list of things to do, a note, a plan."""
    keeps_books: bool = False
    """Whether it is a note of the agent to itself alone, such as a list of things to do."""
    is_listed: bool = False
    """Whether the table has the tool itself, so that its name need not be guessed from."""


ELSEWHERE = "elsewhere"
"""The kind of what may change something elsewhere, and nobody can tell what."""
_NONE = frozenset[str]()
_FACTS = msgspec.toml.decode(
    (resources.files("replay_pipeline.actions") / "consequences.toml").read_bytes(),
    type=_Facts,
)


def consequence_of(words: Sequence[str]) -> Consequence:
    """Return the consequence of one simple command, given its words with quoting resolved."""
    words = _unwrapped(words)
    if words and words[0] == "xargs":
        return consequence_of(_run_by_xargs(words))
    name, facts = _looked_up(words, _FACTS.looks)
    rest = list(words[len(name) :])
    only_looks = facts is not None and not _has_one_of(rest, facts) and _prints(words[0], rest)
    name, facts = _looked_up(words, _FACTS.keeps)
    keeps = facts is not None and not _has_one_of(words[len(name) :], facts)
    acts = _listed_acts(words) | _other_acts(words) | _handed_acts(words) | _said_acts(words)
    return Consequence(only_looks and not acts, acts, keeps or (only_looks and not acts))


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """Return the words of the program that is run in the end, without options of `git` itself."""
    at = 0
    if list(words[:2]) == ["command", "-v"]:
        return words
    while at < len(words) and (words[at] in _WRAPPERS or _ASSIGNED.match(words[at])):
        at += 1
        while 0 < at < len(words) - 1 and words[at].startswith("-"):
            at += 1
    words = words[at:] or words
    if words:
        words = [_BIN.sub("", words[0]), *words[1:]]
    if words[:1] != ["git"]:
        return words
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _GIT_VALUED else 1
    return ["git", *words[at:]]


def _listed_acts(words: Sequence[str]) -> frozenset[str]:
    name, facts = _looked_up(words, _FACTS.acts)
    return frozenset(
        kind.strip()
        for kind, _, needed in (fact.partition(":") for fact in (facts or "").split(";"))
        if kind.strip() and (not needed or _has_one_of(words[len(name) :], needed))
    )


def _other_acts(words: Sequence[str]) -> frozenset[str]:
    """Return the consequences that no list of options tells."""
    operands = [word for word in words if not word.startswith("-")]
    match operands[:2]:
        case ["find", *_]:
            for at, word in enumerate(words):
                if word in ("-exec", "-execdir", "-ok", "-okdir"):
                    return consequence_of(words[at + 1 :]).acts
        case ["git", "push"] if any(word[:1] in ("+", ":") for word in operands[2:]):
            return frozenset({"force"})
        case ["git", "config"] if "--global" in words and len(operands) > 3:
            return frozenset({"session"})
        case ["git", "checkout"] if any(map(_A_FILE.match, operands[2:])):
            return frozenset({"discard"})
        case ["gh", "api"]:
            sends = _sent(words, implied=_has_one_of(words, "-f --raw-field -F --field --input"))
            if "graphql" in operands:
                sends = "POST" if any("mutation" in word for word in words) else None
            return frozenset({"delete" if sends == "DELETE" else "publish"} if sends else ())
        case ["http" | "https" | "xh", *_]:
            sends = _SENDS & {word.upper() for word in operands[1:2]}
            return frozenset({"delete" if "DELETE" in sends else "publish"} if sends else ())
        case ["dd", *_]:
            return frozenset(
                {"delete"} if any(word.startswith("of=/dev/") for word in words) else ()
            )
        case ["wget", *_]:
            return frozenset(
                {"publish"} if _has_one_of(words, "--post-data --post-file --method") else ()
            )
        case ["invoke-restmethod" | "invoke-webrequest" | "irm" | "iwr", *_]:
            return acts_in_code(" ".join(words)) & {"publish"}
        case ["curl", *_]:
            data = "-d --data --data-raw --data-binary --json -F --form -T --upload-file"
            sends = _sent(words, implied=_has_one_of(words, data))
            far = [word for word in operands[1:] if "/" in word and not _LOCAL.match(word)]
            return frozenset({"publish"} if sends and far else ())
    return frozenset()


def _sent(words: Sequence[str], *, implied: bool) -> str | None:
    """Return the method of a request that changes something; `None` of one that only asks."""
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("-X", "--method", "--request"):
            method = (value or "".join(words[at + 1 : at + 2])).upper()
            return method if method in _SENDS else None
        if word.startswith("-X") and word[2:].upper() in _SENDS:
            return word[2:].upper()
    return "POST" if implied else None


def _looked_up(words: Sequence[str], facts: dict[str, str]) -> tuple[Sequence[str], str | None]:
    for n in range(min(_MAX_NAME_WORDS, len(words)), 0, -1):
        if (found := facts.get(" ".join(words[:n]))) is not None:
            return words[:n], found
    return (), None


def _has_one_of(words: Sequence[str], options: str) -> bool:
    """Return whether one of the options is among the words, alone, with a value or in a cluster."""
    for option in options.split():
        is_short = len(option) == 2 and option[0] == "-" and option != "--"
        for word in words:
            if word == option or word.startswith(f"{option}="):
                return True
            if is_short and re.match(r"-[^-]", word) and option[1] in word:
                return True
    return False


def _prints(program: str, words: list[str]) -> bool:
    """Return whether `sed`, `awk` and `uniq` write no file with these words; true of all other programs."""
    operands = [word for word in words if not word.startswith("-")]
    if program == "sed":
        return all(_PRINTS_LINES.fullmatch(script) for script in operands[:1])
    if program == "uniq":
        return len(operands) < 2
    return program != "awk" or not any(map(_AWK_WRITES.search, words))


def _run_by_xargs(words: Sequence[str]) -> Sequence[str]:
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in _VALUED_BY_XARGS else 1
    return words[at:]


_KIND_OF = {word: kind for kind, words in _FACTS.verbs.items() for word in words.split()}
_KIND_OF_THING = {
    word: kind for kind, words in reversed(_FACTS.things.items()) for word in words.split()
}
_LOCAL_SERVERS = frozenset(_FACTS.local["names"].split())
_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_WEAK = frozenset({"write", "here", "look", "note"})


_OF_SCRIPTS = frozenset({"data", "deploy", "publish", "delete", "push", "tag"})


def _said_acts(words: Sequence[str]) -> frozenset[str]:
    """Return what the name of a script of the project says, or the words behind a program of a cloud."""
    for name, n_lead in _FACTS.scripts.items():
        if list(words[: name.count(" ") + 1]) == name.split() and len(words) > n_lead:
            said = {_KIND_OF[word] for word in names_in(words[n_lead]) if word in _KIND_OF}
            return _NONE if "look" in said else frozenset(said & _OF_SCRIPTS)
    if not words or words[0] not in _FACTS.clouds or {"--help", "--dry-run"} & {*words}:
        return _NONE
    return _acts_in_cloud(words, _FACTS.clouds[words[0]])


def _acts_in_cloud(words: Sequence[str], other: str) -> frozenset[str]:
    said = [word for word in words[1:5] if not word.startswith("-")]
    if not said and "--prod" not in words:
        return frozenset({other} if words[0] == "vercel" else ())
    if words[0] == "aws" and said[:1] == ["s3"]:
        kind = {"ls": "look", "presign": "look", "rm": "delete", "rb": "delete"}.get(
            " ".join(said[1:2]), other
        )
        return frozenset({kind} - {"look"})
    kinds = [kind for word in said for each in names_in(word)[:1] if (kind := _KIND_OF.get(each))]
    strong = [kind for kind in kinds if kind not in _WEAK]
    if "look" in kinds and not strong:
        return _NONE
    is_money = other == "pay" and (strong or "write" in kinds)
    return frozenset({other if is_money or not strong else strong[-1]})


def names_in(name: str) -> list[str]:
    """Return the words of a name, in lower case: `merge_pull_request`, `deletePod`, `db:reset`."""
    return [word.lower() for word in _NAME_WORDS.findall(name)]


_STATEMENTS = re.compile(
    r"\b(?:drop\s+(?:table|database|schema|index|view|column|user|role)|truncate\s+(?:table\s+\w|[\w.]+\s*(?:;|$))|delete\s+from|"
    r"update\s+[\w.\"`\[\]]+\s+set|insert\s+(?:or\s+\w+\s+)?into|replace\s+into|alter\s+(?:table|database|user|role)|"
    r"create\s+(?:or\s+replace\s+)?(?:unique\s+)?(?:table|index|database|schema|view|user|role|extension|function|trigger)|"
    r"grant\s+\w|revoke\s+\w|merge\s+into|flushall|flushdb|(?:drop(?:database|index|indexes)?|deletemany|deleteone|updatemany|"
    r"updateone|insertmany|insertone|bulkwrite|replaceone|remove|renamecollection|createcollection|createindex)\s*\()",
    re.IGNORECASE,
)
_REDIS = frozenset(
    [
        "del",
        "set",
        "hset",
        "lpush",
        "rpush",
        "sadd",
        "zadd",
        "expire",
        "rename",
        "unlink",
        "incr",
        "decr",
        "flushall",
        "flushdb",
        "shutdown",
        "config",
    ]
)
_CODE = {
    "delete": r"shutil\.(?:rmtree|move)|os\.(?:remove|unlink|rmdir|removedirs)\b|\.unlink\(|\.rmdir\(|\brm(?:dir)?Sync\(|unlinkSync\(|"
    r"fs(?:\.promises|Promises)?\.(?:rm|unlink|rmdir)\(|\brimraf\b|File\.delete|FileUtils\.rm|\bunlink\s*\(|\[IO\.(?:File|Directory)\]::Delete",
    "publish": r"(?:requests|httpx|session|client|axios|got|ky|http)\.(?:post|put|patch|delete)\(|method[\"']?\s*[:=]\s*[\"'](?:POST|PUT|PATCH|DELETE)|"
    r"urlopen\([^)]*data=|smtplib|send_?mail\(|Net::HTTP::(?:Post|Put|Delete)|-Method\s+[\"']?(?:Post|Put|Patch|Delete)",
    "stop": r"os\.kill(?:pg)?\(|process\.kill\(",
}
_IN_CODE = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _CODE.items()}
_LOCAL_ADDRESS = re.compile(r"https?://(?:localhost|127\.|0\.0\.0\.0|\[::1?\])")
_RUN_BY_CODE = re.compile(
    r"(?:os\.system|subprocess\.\w+|execSync|spawnSync|exec|spawn|system|popen)\(\s*(\[[^\]]*\]|[\"'][^\"']*[\"'])",
    re.IGNORECASE,
)


def acts_in_statements(text: str) -> frozenset[str]:
    """Return `data` if statements for a database, or a cache, change something there."""
    first = text.split()[:1]
    is_changed = _STATEMENTS.search(text) or (first and first[0].lower() in _REDIS)
    return frozenset({"data"} if is_changed else ())


def acts_in_code(text: str) -> frozenset[str]:
    """Return the consequences that stand in code, as in `python -c`, or in a script behind `<<`."""
    found = {kind for kind, pattern in _IN_CODE.items() if pattern.search(text)}
    if "publish" in found and _LOCAL_ADDRESS.search(text):
        found.remove("publish")
    for script in _RUN_BY_CODE.findall(text):
        found |= acts_in_lines(re.sub(r"[\[\]\"',]", " ", script))
    return frozenset(found) | acts_in_statements(text)


_JOINTS = re.compile(r"&&|\|\||[;|\n&]")


def acts_in_lines(text: str) -> frozenset[str]:
    """Return the consequences of commands that no parser has read: PowerShell, `cmd`, or a script cut in pieces."""
    return frozenset(kind for words in commands_in(text) for kind in consequence_of(words).acts)


def only_looks_in_lines(text: str) -> bool:
    """Return whether commands that no parser has read only look."""
    return ">" not in text and all(consequence_of(words).only_looks for words in commands_in(text))


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in lines that no parser has read."""
    for piece in _JOINTS.split(text.replace("`\n", " ")):
        try:
            words = shlex.split(piece.replace("\\", "/"), comments=True)
        except ValueError:
            words = piece.split()
        words = [word.strip("(){}\"'") for word in words if word.strip("(){}\"'")]
        if words[:1] == ["sudo"]:
            words = words[1:]
        if words:
            yield [words[0].lower().removesuffix(".exe"), *words[1:]]


_VALUED_BY_SSH = frozenset(
    [
        "-i",
        "-p",
        "-P",
        "-l",
        "-o",
        "-F",
        "-J",
        "-L",
        "-R",
        "-D",
        "-b",
        "-c",
        "-E",
        "-m",
        "-S",
        "-W",
        "-w",
    ]
)


def script_of(
    words: Sequence[str],
) -> tuple[str, Literal["shell", "lines", "code", "statements"]] | None:
    """Return what a program is handed to run, and in which language; `None` if it is handed nothing."""
    program, rest = words[0], list(words[1:])
    if program == "sudo" and rest:
        at = next((n for n, word in enumerate(rest) if not word.startswith("-")), len(rest))
        return (" ".join(rest[at:]), "lines") if at < len(rest) else None
    if program == "eval":
        return " ".join(rest), "shell"
    if program in ("bash", "sh", "zsh", "dash", "ksh", "su", "wsl") and len(rest) > 1:
        at = next((n for n, word in enumerate(rest) if re.fullmatch(r"-\w*c|-e", word)), None)
        return (rest[at + 1], "shell") if at is not None and at + 1 < len(rest) else None
    if program in ("powershell", "powershell.exe", "pwsh", "cmd", "cmd.exe"):
        at = next(
            (n for n, word in enumerate(rest) if word.lower() in ("-command", "-c", "/c", "/k")),
            None,
        )
        return (" ".join(rest[at + 1 :]), "lines") if at is not None else None
    if program in ("python", "python3", "node", "deno", "bun", "ruby", "perl", "php", "tsx"):
        at = next(
            (n for n, word in enumerate(rest) if word in ("-c", "-e", "-r", "--eval", "eval")), None
        )
        return (" ".join(rest[at + 1 :]), "code") if at is not None else None
    if program == "ssh":
        at = 0
        while at < len(rest) and rest[at].startswith("-"):
            at += 2 if rest[at] in _VALUED_BY_SSH else 1
        return (" ".join(rest[at + 1 :]), "shell") if at + 1 < len(rest) else None
    if program in ("docker", "podman", "kubectl", "docker-compose", "oc") and "exec" in rest[:3]:
        inner = rest[rest.index("--") + 1 :] if "--" in rest else rest[rest.index("exec") + 1 :]
        while inner and inner[0].startswith("-"):
            inner = inner[2 if inner[0] in ("-u", "-w", "-e", "-n", "-c") else 1 :]
        return (shlex.join(inner if "--" in rest else inner[1:]), "shell") if inner else None
    name, options = _looked_up(words, _FACTS.sql)
    if options is None:
        return None
    handed = list(words[len(name) :])
    given = [
        value
        for at, word in enumerate(handed)
        for option in options.split()
        if option != "-" and (value := _value_of(option, word, handed[at + 1 :])) is not None
    ]
    if "-" in options.split():
        given += [" ".join(word for word in handed if not word.startswith("-"))]
    return (" ; ".join(given), "statements") if given else None


def _value_of(option: str, word: str, after: Sequence[str]) -> str | None:
    if word == option:
        return after[0] if after else None
    if word.startswith(f"{option}=") or (len(option) == 2 and word.startswith(option)):
        return word[len(option) :].removeprefix("=")
    is_last_of_cluster = len(option) == 2 and re.fullmatch(rf"-[A-Za-z]+{option[1]}", word)
    return after[0] if is_last_of_cluster and after else None


def _handed_acts(words: Sequence[str]) -> frozenset[str]:
    """Return the consequences of statements, code and lines that a program is handed.

    A script of a shell is left to the reader of scripts.
    """
    if not words:
        return _NONE
    handed = script_of(words)
    if words[0] == "ssh" and handed is not None:
        is_look = only_looks_in_lines(handed[0])
        return acts_in_lines(handed[0]) or (_NONE if is_look else frozenset({"deploy"}))
    if (
        words[0] in ("scp", "rsync", "sftp")
        and ":" in words[-1]
        and not re.match(r"[A-Za-z]:[\\/]", words[-1])
    ):
        return frozenset({"deploy"})
    if words[0] == "redis-cli":
        operands = [word.lower() for word in words[1:] if not word.startswith("-")]
        return frozenset({"data"} if _REDIS & {*operands[:3]} else ())
    match handed:
        case (text, "statements"):
            return acts_in_statements(text)
        case (text, "code"):
            return acts_in_code(text)
        case (text, "lines"):
            return acts_in_lines(text)
    return _NONE


_SHELLS = frozenset(
    [
        "bash",
        "shell",
        "sh",
        "exec_command",
        "local_shell",
        "run_command",
        "run_shell_command",
        "run_terminal_cmd",
        "execute_command",
        "terminal",
        "powershell",
        "pwsh",
        "cmd",
        "start_process",
        "container.exec",
    ]
)
"""Tools that run a command, in lower case."""
_COMMANDS = ("command", "cmd", "script", "input", "commandline", "command_line")
_STATED = ("sql", "query", "statement", "queries", "statements")


def consequence_of_tool(
    name: str, arguments: Mapping[str, Any], annotations: Mapping[str, Any] | None = None
) -> Consequence:
    """Return the consequence of a call of a tool other than Bash.

    Args:
        name: the tool; one of a server is called `mcp__SERVER__TOOL`.
        arguments: of the call.
        annotations: of the tool's definition, as servers give them: `readOnlyHint`, `destructiveHint`.
    """
    own = name.rpartition("__")[2] if name.startswith("mcp__") else name
    text = next((_command_text(arguments[key]) for key in _COMMANDS if key in arguments), None)
    if text is not None and own.lower() in _SHELLS:
        acts = acts_in_lines(text) | acts_in_code(text)
        return Consequence(only_looks_in_lines(text) and not acts, acts)
    known = _FACTS.tools.get(name.lower())
    is_foreign = name.startswith("mcp__")
    server = names_in(name.split("__")[1]) if is_foreign and name.count("__") > 1 else []
    if known is None:
        known = _kind_of_tool(own, server, annotations or {}, is_foreign=is_foreign)
    acts = {known} - {"look", "note", "books", "here", "nothing"}
    stated = " ; ".join(str(arguments[key]) for key in _STATED if key in arguments)
    if (
        stated
        and name.lower() not in _FACTS.tools
        and known != "here"
        and not (annotations or {}).get("readOnlyHint")
    ):
        found = acts_in_statements(stated) | frozenset(
            {"publish"} if re.match(r"\s*mutation\b", stated) else ()
        )
        is_asking = re.match(
            r"\s*(?:select|with|show|describe|explain|pragma|query|\{)", stated, re.IGNORECASE
        )
        acts = {*found} if found or is_asking else acts
        known = "look" if is_asking and not found else known
    if str(arguments.get("method", "")).upper() in _SENDS:
        acts.add("delete" if str(arguments["method"]).upper() == "DELETE" else "publish")
    if "code" in arguments and known != "look":
        acts |= acts_in_code(str(arguments["code"]))
    return Consequence(
        known == "look" and not acts,
        frozenset(acts),
        is_note=known in ("note", "books") and not acts,
        keeps_books=known == "books" and not acts,
        is_listed=name.lower() in _FACTS.tools,
    )


def _command_text(value: Any) -> str:
    if isinstance(value, list):
        words = [str(word) for word in value]
        inner = script_of(words) if words else None
        return inner[0] if inner is not None else shlex.join(words)
    return str(value)


def _kind_of_tool(
    own: str, server: Sequence[str], annotations: Mapping[str, Any], *, is_foreign: bool
) -> str:
    """Return the kind that a tool's name tells, for one of a server also by what it works on."""
    words = names_in(own)
    kinds = [_KIND_OF[word] for word in words if word in _KIND_OF]
    is_local = not _LOCAL_SERVERS.isdisjoint(server)
    if annotations.get("readOnlyHint") is True:
        return "look"
    strong = [kind for kind in kinds if kind not in _WEAK]
    if words and _KIND_OF.get(words[0]) == "look" and not annotations.get("destructiveHint"):
        return "look"
    if words and _KIND_OF.get(words[-1]) == "look" and not strong:
        return "look"
    if is_local:
        return (
            "delete"
            if "delete" in kinds and "file" in words
            else "note"
            if "note" in kinds
            else "here"
        )
    if words and (first := _KIND_OF.get(words[0])) is not None and first not in _WEAK:
        return first
    if kinds and kinds[0] == "here" and not strong:
        return "here"
    if not is_foreign and not kinds:
        return "nothing" if not annotations.get("destructiveHint") else ELSEWHERE
    thing = next((_KIND_OF_THING[word] for word in words if word in _KIND_OF_THING), None)
    if "write" in kinds and thing is not None:
        return thing
    if strong:
        return strong[0]
    if "note" in kinds:
        return "note"
    return ELSEWHERE


def acts_of_name(name: str) -> frozenset[str]:
    """Return the consequences that the name of a skill or of a user's command tells: `commit-push-pr`."""
    words = names_in(name)
    kinds = {_KIND_OF[word] for word in words if word in _KIND_OF} - _WEAK
    if {"pr", "mr"} & {*words}:
        kinds.add("publish")
    return frozenset(kinds)


def says(words: str, name: str) -> bool:
    """Return whether somebody's words name a tool by what it does: by its verb and by its server or its thing."""
    heard = {word[:5] for word in names_in(words)}
    own, _, server = name.removeprefix("mcp__").partition("__")[::-1]
    parts = names_in(own)
    verbs = [word for word in parts if word in _KIND_OF]
    things = [
        word for word in (*parts, *names_in(server)) if word not in _KIND_OF and len(word) > 3
    ]
    is_thing = any(word[:5] in heard for word in things)
    return is_thing and (not verbs or any(word[:5] in heard for word in verbs))
