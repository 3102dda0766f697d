"""Read from its syntax tree what a shell command does. Nothing is ever run or looked up."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Tree

from replay_pipeline.actions.arguments import (
    ACTIVE,
    QUOTED,
    Arguments,
    arguments_of,
    plain_text,
    unquoted,
)
from replay_pipeline.actions.consequences import script_of
from replay_pipeline.actions.paths import absolute, is_absolute
from replay_pipeline.actions.programs import PROGRAMS

_SHORT_BYTES = 250
_MAX_REPORTS = 60
"""Steps of the parser, in its own unit; real commands take up to three."""

_BASH = Language(tree_sitter_bash.language())


class _OwnParser(threading.local):
    """A parser for each thread: one that two threads use at once crashes the process."""

    def __init__(self) -> None:
        self.parser = Parser(_BASH)


_OWN = _OwnParser()
_ASCII = bytes(range(128)) + b"%" * 128
"""The grammar's scanner looks every character up in C's table of 256, and crashes at one far beyond. A `%` is as little
a letter, a digit, or a blank as they are."""
CHAIN = frozenset({"list", "pipeline", "redirected_statement", "negated_command"})
"""Kinds of nodes that join commands. Their order says what binds to what."""
REDIRECTS = frozenset({"file_redirect", "heredoc_redirect", "herestring_redirect"})


class UnreadableError(Exception):
    """The command can't be parsed with certainty, so it is compared as text."""


class PipeCommand(NamedTuple):
    """One command of a pipe."""

    joint: str
    """The operator before it, empty for the first command."""
    is_negated: bool
    body: Node | None
    redirects: list[Node]


def parsed(source: bytes) -> Tree:
    """Return the syntax tree of a command that parses without errors in bounded time.

    Recovery from an error takes time that grows with the square of the length. The limit counts
    parser steps and not seconds, so every machine gives up at the same place.

    Raises:
        UnreadableError: the command does not parse, or not in bounded time.
    """
    parser, source = _OWN.parser, source.translate(_ASCII)
    if len(source) <= _SHORT_BYTES:
        return parser.parse(source)
    n_reports = count()
    gives_up = lambda _, has_error: has_error or next(n_reports) >= _MAX_REPORTS  # noqa: E731
    parser.reset()
    try:
        return parser.parse(lambda offset, _point: source[offset:], progress_callback=gives_up)
    except ValueError as error:
        raise UnreadableError from error
    finally:
        parser.reset()


def joined_pipes(node: Node) -> Iterator[tuple[str, list[PipeCommand]]]:
    """Yield the pipes of a chain, each with the operator before it.

    Raises:
        UnreadableError: the chain has a form that the reader does not know.
    """
    operator, stages, joint, is_negated = "", list[PipeCommand](), "", False
    for part in _flat(node):
        kind = part.type
        if kind in ("&&", "||"):
            if not stages or joint:
                raise UnreadableError
            yield operator, stages
            operator, stages = kind, []
        elif kind in ("|", "|&"):
            joint = kind
        elif kind == "!":
            is_negated = not is_negated
        elif kind in REDIRECTS and stages and not joint:
            stages[-1].redirects.append(part)
        elif stages and not joint:
            raise UnreadableError
        else:
            body = None if kind in REDIRECTS else part
            stages.append(PipeCommand(joint, is_negated, body, [part] if body is None else []))
            joint, is_negated = "", False
    if not stages or joint:
        raise UnreadableError
    yield operator, stages


def _flat(node: Node) -> Iterator[Node]:
    """Yield the operators, commands and redirections of a chain in the order they are written in."""
    if node.type in CHAIN or node.type == "heredoc_redirect":
        if node.type == "heredoc_redirect":
            yield node
        for child in node.children:
            if child.type not in _OF_HEREDOC and child.type not in ("comment", "\n"):
                yield from _flat(child)
    else:
        yield node


_OF_HEREDOC = frozenset(
    {"<<", "<<-", "file_descriptor", "heredoc_start", "heredoc_body", "heredoc_end"}
)


Form = tuple[Any, ...]
"""A normalized piece of syntax. Equal forms have equal effects."""

MAX_DEPTH = 40
_PLAIN_WORDS = frozenset(
    ["word", "number", "variable_name", "special_variable_name", "test_operator", "file_descriptor"]
)

MAX_COMMAND_BYTES = 4_096
_MAX_SIGNS = 200
_SIGNS = re.compile(r"[()\[\]{}`;&|<>\n]")
"""What makes the parser look far ahead: its worst time is their number times the length."""
_MAX_NODES = 1_200
_MAX_HEREDOCS = 50
_MAX_PLAIN_WORDS = 300
"""A longer list of bare commands is read from its tree, which has a bound of its own."""

Lines = tuple[float, float]

_BARE_COMMAND = re.compile(r"[A-Za-z][\w./-]*(?: +(?:-[\w./:,@%+=-]*|[\w./:,@%+][\w./:,@%+-]*))*")
"""A program and words in which the shell sees nothing special."""
_QUOTED_TIME = re.compile(r"""['"\\]+time|time\s+(?:-p\s+|--\s+)*['"\\]""")
"""`time` and its option are words of the shell only where they are bare."""
_KEYWORDS = frozenset(
    [
        *("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case"),
        *("esac", "select", "function", "in", "coproc"),
        *("export", "declare", "typeset", "local", "readonly", "unset", "unsetenv"),
    ]
)
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f]")
_SEPARATORS = frozenset({";", "\n", ";;", "comment"})
_CHANGE_FOLDER = frozenset({"cd", "pushd", "popd"})
_STATEMENTS = frozenset(
    [
        *("command", "redirected_statement", "list", "pipeline", "negated_command"),
        *("variable_assignment", "variable_assignments", "subshell", "compound_statement"),
        *("declaration_command", "unset_command", "test_command", "if_statement", "case_statement"),
        *("for_statement", "c_style_for_statement", "while_statement", "function_definition"),
    ]
)
_NOTHING: Form = ("nothing",)
_MAX_INSIDE = 2_000
"""Characters of a script in a word that is read as well."""
_LAST_LINE = 2.0**52
"""Stands for the last line of an output, however long it is."""


class ShellPlan(NamedTuple):
    """A command after parsing."""

    effect: Form
    """Equal for commands that do the same."""
    target: tuple[Form, ...] | None
    """Programs with their operands, in order. `None` if the command can't be parsed."""
    shown: Lines | None = None
    """First and last line that a final pipe into `head` or `tail` shows."""
    only_looks: bool = False
    """Whether the command changes nothing."""
    acts: frozenset[str] = frozenset()
    """Kinds of consequences that a person must ask for, such as `push`."""
    keeps_files: bool = False
    """Whether the command leaves source files alone."""


@lru_cache(maxsize=8_192)
def shell_plan(command: str, cwd: str | None) -> ShellPlan:
    """Parse `command` as if a shell runs it in `cwd`.

    A command that doesn't parse, or that is too long or too deeply nested, equals only itself.
    """
    if len(command) > MAX_COMMAND_BYTES:
        return _opaque(command)
    return _plain_plan(command, cwd) or parsed_plan(command, cwd)


def _opaque(command: str) -> ShellPlan:
    return ShellPlan(("text", command.strip()), None)


def _plain_plan(command: str, cwd: str | None) -> ShellPlan | None:
    """Return the plan of bare commands joined by `&&` or by `|`, which need no syntax tree."""
    # A bare command has no quotes, so a comment in it is one, up to the end of the line.
    if " #" in command and "\n" not in command:
        command = command.partition(" #")[0].rstrip(" ")
    is_pipe = " | " in command
    reader = _Reader(b"", cwd)
    joined: list[Form] = []
    n_words = 0
    for part in command.split(" | " if is_pipe else " && "):
        words = part.split()
        n_words += len(words)
        is_long = n_words > _MAX_PLAIN_WORDS
        if is_long or not _BARE_COMMAND.fullmatch(part) or words[0] in _KEYWORDS:
            return None
        if is_pipe:
            joined.append(reader.stage(lambda words=words: reader.simple((), words, ()), joined))
        else:
            _append(joined, "&&", reader.part(lambda words=words: reader.simple((), words, ())))
    return reader.plan(("|", *joined) if is_pipe else _listed(joined))


def parsed_plan(command: str, cwd: str | None) -> ShellPlan:
    """Compute `shell_plan` from the syntax tree. A simple command doesn't need this."""
    if _CONTROL.search(command):
        return _opaque(command)
    try:
        source = command.encode()
        is_long = len(source) > MAX_COMMAND_BYTES or len(_SIGNS.findall(command)) > _MAX_SIGNS
        if is_long or command.count("<<") > _MAX_HEREDOCS:
            return _opaque(command)
        root = parsed(source).root_node
        if root.has_error or root.descendant_count > _MAX_NODES:
            return _opaque(command)
        reader = _Reader(source, cwd)
        return reader.plan(reader.sequence(root.children, 0))
    except (UnicodeError, UnreadableError):
        return _opaque(command)


def _input_first(redirects: tuple[Form, ...]) -> tuple[Form, ...]:
    """Return redirections with the text that is read ahead of the files, where that changes nothing."""
    texts = [each for each in redirects if each[1] in ("<<", "<<<")]
    others = [each for each in redirects if each[1] not in ("<<", "<<<")]
    is_free = len(texts) == 1 and all(each[0] != "0" and each[2] != "0" for each in others)
    return (*texts, *others) if is_free else redirects


class _Reader:
    """The reader of one syntax tree. It tracks the directory that each command runs in.

    Args:
        source: the command.
        cwd: folder in which it runs.
    """

    def __init__(self, source: bytes, cwd: str | None) -> None:
        self.source = source
        self.cwd = absolute(cwd, None) if cwd else None
        self.folder = self.cwd
        self.only_looks = self.keeps_files = True
        self.commands: list[Form] = []
        self.looks: set[Form] = set()
        """Parts of lists that change nothing."""
        self.acts: frozenset[str] = frozenset()

    def plan(self, effect: Form) -> ShellPlan:
        """Return the plan of the whole command, when all of it has been read."""
        if not self.only_looks:
            effect = self.without_looks_behind(effect)
        effect, shown = _without_display(effect, only_looks=self.only_looks)
        return ShellPlan(
            effect, tuple(self.commands), shown, self.only_looks, self.acts, self.keeps_files
        )

    def part(self, read: Callable[[], Form]) -> Form:
        """Read one part of a list, and note whether it changes nothing, not even the folder."""
        only_looked, noted = self.only_looks, len(self.commands)
        self.only_looks = True
        form = read()
        is_cd = any(each[0] in _CHANGE_FOLDER for each in self.commands[noted:])
        if self.only_looks and not is_cd and form[0] in ("command", "|"):
            self.looks.add(form)
        self.only_looks &= only_looked
        return form

    def without_looks_behind(self, effect: Form) -> Form:
        """Take off what only looks behind a consequence: nothing is done by what it shows."""
        while effect[0] == "list" and effect[-2] == ("&&",) and effect[-1] in self.looks:
            effect = _listed([*effect[1:-2]])
        return effect

    # Statements

    def sequence(self, nodes: Iterable[Node], depth: int) -> Form:
        """Return statements one after the other; `;` and a new line are the same.

        Raises:
            UnreadableError: a statement has a form that the reader does not know.
        """
        found: list[Form] = []
        folder = self.folder
        for node in nodes:
            if node.type == "&":
                if not found:
                    raise UnreadableError
                found.append(("&", found.pop()))
                self.folder = folder  # its `cd` happened in another process
            elif node.type not in _SEPARATORS:
                folder = self.folder
                found.append(self.statement(node, depth + 1))
        if len(found) > 1:
            found = [form for form in found if form != _NOTHING] or found[:1]
        return found[0] if len(found) == 1 else (";", *found)

    def statement(self, node: Node, depth: int) -> Form:
        if depth > MAX_DEPTH:
            raise UnreadableError
        kind = node.type
        read = _READERS.get(kind)
        if read is not None:
            return read(self, node, depth)
        if kind not in _STATEMENTS:
            raise UnreadableError
        return self.other(node, depth)

    def chain(self, node: Node, depth: int) -> Form:
        """Return commands joined by operators, with their redirections.

        `&&` and `||` bind alike and to the left, `|` binds tighter, `!` is said of a whole pipe,
        and a redirection belongs to the command before it. The tree gives the redirection of the
        last command of a list to all of the list, and what is piped with it.
        """
        before_all = self.folder
        joined: list[Form] = []
        changes_later = False
        for operator, stages in joined_pipes(node):
            before = self.folder
            _append(joined, operator, self.part(lambda s=stages: self.pipe(s, depth + 1)))
            if self.folder != before:
                changes_later = operator != ""
                if operator == "||":
                    self.folder = None
        if changes_later and self.folder != before_all:
            self.folder = None  # whether it was reached is not known behind the list
        return _listed(joined)

    def pipe(self, stages: list[PipeCommand], depth: int) -> Form:
        is_negated = len(stages) > 0 and stages[0].is_negated
        forms: list[Form] = []
        for stage in stages:
            if stage.is_negated and forms:
                raise UnreadableError
            if stage.joint == "|&":
                forms[-1] = _redirected(forms[-1], (("2", ">&", "1"),))
            if len(stages) == 1:
                forms.append(self.redirected(stage, depth))
            else:
                forms.append(self.stage(lambda s=stage: self.redirected(s, depth), forms))
        form = forms[0] if len(forms) == 1 else ("|", *forms)
        return ("!", form) if is_negated else form

    def stage(self, read: Callable[[], Form], before: list[Form]) -> Form:
        """Return one part of a pipe, in a process of its own: its `cd` ends with it."""
        folder, noted = self.folder, len(self.commands)
        form = read()
        self.folder = folder
        # `| head` says how much is shown of an object, and is none itself.
        if before and len(self.commands) == noted + 1 and len(self.commands[-1]) == 1:
            program = PROGRAMS.get(self.commands[-1][0])
            if program is not None and program.display:
                self.commands.pop()
        return form

    def subshell(self, node: Node, depth: int) -> Form:
        folder = self.folder
        form = ("()", self.sequence(_inside(node), depth))
        self.folder = folder
        return form

    def group(self, node: Node, depth: int) -> Form:
        return ("{}", self.sequence(_inside(node), depth))

    def other(self, node: Node, depth: int) -> Form:
        """Return loops, conditions, functions: the structure as it is, with its words normalised."""
        before = self.folder
        parts: list[Form | str] = [node.type]
        objects: list[Form | str] = [node.type]
        for child in node.children:
            if child.type in _SEPARATORS:
                continue
            if child.type in _STATEMENTS:
                parts.append(self.statement(child, depth + 1))
            elif child.type in ("do_group", "else_clause", "elif_clause", "case_item"):
                parts.append(self.other(child, depth + 1))
            else:
                parts.append(self.nested(child, depth + 1))
                objects.append(parts[-1])
        self.commands.append(tuple(objects))
        if node.type in ("function_definition", "c_style_for_statement"):
            self.only_looks = self.keeps_files = False
        if self.folder != before:
            self.folder = None
        return tuple(parts)

    def nested(self, node: Node, depth: int) -> Form | str:
        """Return the tokens of an expression of a condition or arithmetic, words normalised.

        Raises:
            UnreadableError: the expression has a form that the reader does not know.
        """
        if depth > MAX_DEPTH:
            raise UnreadableError
        if node.type not in ("binary_expression", "unary_expression", "parenthesized_expression"):
            return self.word(node, depth)
        return (node.type, *(self.nested(child, depth + 1) for child in node.children))

    def redirected(self, stage: PipeCommand, depth: int) -> Form:
        body = stage.body
        words: list[str] = []
        redirects: list[Form] = []
        # The operands after `> file` belong to the command, so they are read first.
        for node in stage.redirects:
            if node.type == "file_redirect":
                redirects += self.redirect(node, words, depth)
            elif node.type == "heredoc_redirect":
                redirects.append(self.heredoc(node))
            else:
                redirects.append(self.herestring(node, depth))
        if body is None:
            return self.simple((), words, tuple(redirects))
        if body.type == "command":
            return self.command(body, depth, words=words, redirects=redirects)
        if words:
            raise UnreadableError
        return _redirected(self.statement(body, depth + 1), tuple(redirects))

    def redirect(self, node: Node, words: list[str], depth: int) -> list[Form]:
        """Return one redirection as (descriptor, mode, target); `&> f` is `> f 2>&1`."""
        number = operator = ""
        target: str | None = None
        for child in node.children:
            if child.type == "file_descriptor":
                number = self.text(child)
            elif not child.is_named:
                operator = child.type
            elif target is None:
                target = self.word(child, depth + 1)
            else:
                words.append(self.word(child, depth + 1))
        target = target or ""
        is_duplicate = operator in (">&", "<&") and (target.isdigit() or target == "-")
        if not is_duplicate and target:
            target = self.path(target) + ("/" if target.endswith("/") else "")
        if ">" in operator and not is_duplicate and target != "/dev/null":
            self.only_looks = self.keeps_files = False
        if operator in ("&>", "&>>") or (operator == ">&" and not is_duplicate and not number):
            return [("1", ">>" if operator == "&>>" else ">", target), ("2", ">&", "1")]
        return [(number or ("0" if operator.startswith("<") else "1"), operator, target)]

    # Commands and words

    def command(
        self,
        node: Node,
        depth: int,
        *,
        words: Iterable[str] = (),
        redirects: Iterable[Form] = (),
    ) -> Form:
        if _QUOTED_TIME.match(self.text(node)):
            raise UnreadableError
        environment: list[Node] = []
        own_words: list[str] = []
        own_redirects: list[Form] = []
        word_end = -1
        for child in node.children:
            kind = child.type
            if kind == "variable_assignment":
                environment.append(child)
            elif kind == "file_redirect":
                own_redirects += self.redirect(child, own_words, depth)
            elif kind == "herestring_redirect":
                own_redirects.append(self.herestring(child, depth))
            elif not child.is_named:
                raise UnreadableError
            elif kind != "comment":
                inner = child.children[0] if kind == "command_name" else child
                word = self.word(inner, depth + 1)
                if child.start_byte == word_end:
                    # The tree cuts some words in two, `"$a"\b` for one.
                    own_words[-1] = glued([own_words[-1], word])
                else:
                    own_words.append(word)
                word_end = child.end_byte
        return self.simple(
            self.environment(environment, depth),
            [*own_words, *words],
            (*own_redirects, *redirects),
        )

    def simple(
        self, environment: tuple[str, ...], words: list[str], redirects: tuple[Form, ...]
    ) -> Form:
        redirects = _input_first(redirects)
        if not words:
            return ("command", environment, (), redirects)
        if words[0] in _CHANGE_FOLDER:
            return self.changed_folder(environment, words, redirects)
        arguments = arguments_of(words, self.path)
        self.only_looks &= arguments.consequence.only_looks
        self.keeps_files &= arguments.consequence.keeps_files
        self.acts |= arguments.consequence.acts | _acts_inside(words, self.folder)
        self.note(arguments, redirects)
        return ("command", environment, arguments.effect, redirects)

    def note(self, arguments: Arguments, redirects: tuple[Form, ...]) -> None:
        """Keep what the command acts on, for the level `target`."""
        objects = list(arguments.operands)
        program = PROGRAMS.get(str(objects[0]))
        reads_program = program is not None and program.is_interpreter
        for descriptor, mode, target, *_ in redirects:
            if mode in ("<<", "<<<"):
                if reads_program:
                    objects.append(("<<", target))
            elif mode not in (">&", "<&") and target != "/dev/null":
                objects.append((descriptor, target))
        self.commands.append(tuple(objects))

    def changed_folder(
        self, environment: tuple[str, ...], words: list[str], redirects: tuple[Form, ...]
    ) -> Form:
        if words[0] != "cd" or len(words) != 2 or plain_text(words[1]) in (None, "", "-"):
            self.folder = None
            self.commands.append(tuple(words))
            return ("command", environment, tuple(words), redirects)
        folder = self.path(words[1])
        if folder == self.folder == self.cwd and not redirects and not environment:
            return _NOTHING
        self.folder = folder if is_absolute(folder) else None
        self.commands.append(("cd", folder))
        return ("command", environment, ("cd", folder), redirects)

    def substitution(self, node: Node, depth: int) -> str:
        """Return `$(...)` and backquotes: the script inside, in its own process."""
        opening = node.children[0].type
        if opening == "`" and "\\" in self.text(node):
            return self.text(node)
        folder, noted = self.folder, len(self.commands)
        form = self.sequence(node.children[1:-1], depth)
        self.folder = folder
        del self.commands[noted:]
        # A digest: the text of a form in the text of a form would double every escape.
        digest = blake2b(repr(form).encode("utf-8", "replace"), digest_size=16).hexdigest()
        return f"{'$(' if opening == '`' else opening}{digest})"

    # Words, assignments and redirections

    def text(self, node: Node) -> str:
        """Return the source text of a node."""
        return self.source[node.start_byte : node.end_byte].decode()

    def assignments(self, node: Node, depth: int) -> Form:
        """Return the form of a statement that only makes assignments."""
        nodes = [node] if node.type == "variable_assignment" else node.children
        return ("=", *self.environment(nodes, depth))

    def environment(self, nodes: Iterable[Node], depth: int) -> tuple[str, ...]:
        """Return the form of assignments, sorted if they are independent."""
        found = [self.assignment(node, depth) for node in nodes]
        names = {one.partition("=")[0] for one in found}
        is_independent = len(names) == len(found) and not any(
            ACTIVE in one or QUOTED in one for one in found
        )
        return tuple(sorted(found) if is_independent else found)

    def assignment(self, node: Node, depth: int) -> str:
        """Return one assignment with its value as a word.

        Raises:
            UnreadableError: the assignment has a form that the reader does not know.
        """
        name = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        if name is None:
            raise UnreadableError
        end = value.start_byte if value is not None else node.end_byte
        head = self.source[node.start_byte : end].decode()
        if value is None:
            return head
        if value.type == "array":
            return head + ACTIVE + self.text(value)
        return head + self.word(value, depth + 1)

    def heredoc(self, node: Node) -> Form:
        """Read a here-document. The rest of its first line is read as part of the chain."""
        mark = body = ""
        strips_tabs = False
        start = 0
        for child in node.children:
            kind = child.type
            if kind == "<<-":
                strips_tabs = True
            elif kind == "heredoc_start":
                mark = self.text(child)
            elif kind == "heredoc_body":
                # The tree leaves out blanks at the start of the first line.
                start = self.source.rfind(b"\n", 0, child.start_byte) + 1
                body = self.source[start : child.end_byte].decode()
            elif kind == "heredoc_end":
                end = child.start_byte
                body = self.source[start:end].decode() if start else body
        if strips_tabs:
            body = re.sub(r"(?m)^\t+", "", body)
        is_quoted = any(quote in mark for quote in "'\"\\")
        expands = not is_quoted and any(sign in body for sign in "$`\\")
        if expands:
            self.only_looks = self.keeps_files = False  # a substitution in it is not read
        return ("0", "<<", body, expands)

    def herestring(self, node: Node, depth: int) -> Form:
        """Return the form of a here-string."""
        return ("0", "<<<", self.word(node.children[-1], depth + 1))

    def path(self, word: str) -> str:
        """Return a path word, resolved if that is certain."""
        home = word.startswith(ACTIVE + "~")
        if home and (word[2:3] in ("", "/")):
            resolved = absolute(word[1:], self.cwd)
            return word if resolved.startswith("~") else resolved
        if home or not word or QUOTED in word or "$" in word or "`" in word:
            return word
        if ".." in word and ACTIVE in word:
            return word
        return absolute(f"./{word}" if word.startswith("~") else word, self.folder)

    def word(self, node: Node, depth: int) -> str:
        """Return a word with quoting resolved and active characters marked (see `ACTIVE`).

        Raises:
            UnreadableError: the word has a form that the reader does not know.
        """
        if depth > MAX_DEPTH:
            raise UnreadableError
        kind = node.type
        if kind == "raw_string":
            return self.text(node)[1:-1]
        if kind == "string":
            return self.joined(node, depth, is_quoted=True)
        if kind in ("concatenation", "array"):
            return self.joined(node, depth, is_quoted=False)
        if kind in ("command_substitution", "process_substitution"):
            return ACTIVE + self.substitution(node, depth)
        if kind in ("simple_expansion", "expansion"):
            return ACTIVE + self.expansion(node)
        if kind in _PLAIN_WORDS or not node.is_named:
            return unquoted(self.text(node))
        return ACTIVE + self.text(node)

    def joined(self, node: Node, depth: int, *, is_quoted: bool) -> str:
        """Return the pieces of a composite word, joined with the text between them."""
        start, end = node.start_byte, node.end_byte
        if is_quoted:
            start, end = start + 1, end - 1
        parts: list[str] = []
        at = start
        for child in node.children:
            if child.type in ("string_content", '"') or child.start_byte < start:
                continue
            if is_quoted and child.is_named:
                # The tree counts blanks before an expansion as part of it.
                text = self.text(child)
                begin = child.start_byte + len(text) - len(text.lstrip())
                parts.append(_double_quoted(self.source[at:begin].decode()))
                parts.append(self.quoted(child, depth + 1))
                at = child.end_byte
            elif not is_quoted:
                parts.append(unquoted(self.source[at : child.start_byte].decode()))
                parts.append(self.word(child, depth + 1))
                at = child.end_byte
        rest = self.source[at:end].decode()
        parts.append(_double_quoted(rest) if is_quoted else unquoted(rest))
        return "".join(parts) if is_quoted else glued(parts, n_pieces=len(node.children))

    def quoted(self, node: Node, depth: int) -> str:
        """Return an expansion inside double quotes."""
        if node.type == "command_substitution":
            return QUOTED + self.substitution(node, depth)
        if node.type in ("simple_expansion", "expansion"):
            return QUOTED + self.expansion(node)
        return QUOTED + self.text(node).strip()

    def expansion(self, node: Node) -> str:
        """Return an expansion. `$x` and `${x}` get the same form, and all others stay as written."""
        text = self.text(node).strip()
        if match := re.fullmatch(r"\$(\w+|[@*#?$!-])|\$\{(\w+|[@*#?$!-])\}", text):
            return f"${{{match[1] or match[2]}}}"
        return text


def _acts_inside(words: list[str], folder: str | None) -> frozenset[str]:
    """Return the consequences of a script that a program is handed in its words."""
    handed = script_of([_without_marks(word) for word in words])
    if handed is None or handed[1] != "shell" or len(handed[0]) > _MAX_INSIDE:
        return frozenset()
    return shell_plan(handed[0], folder).acts


def _without_marks(word: str) -> str:
    return word.replace(ACTIVE, "").replace(QUOTED, "")


def _append(joined: list[Form], operator: str, form: Form) -> None:
    if operator == "&&" and joined == [_NOTHING]:
        joined[0] = form
    else:
        joined += [(operator,), form] if joined else [form]


def _listed(joined: list[Form]) -> Form:
    return joined[0] if len(joined) == 1 else ("list", *joined)


def _without_display(effect: Form, *, only_looks: bool) -> tuple[Form, Lines | None]:
    """Take off a pipe into `head` or `tail` at the very end; give the lines that it shows.

    `head` stops what writes to it, so it is taken off a look alone. Elsewhere than at the end,
    somebody goes by what comes out.
    """
    if effect[0] in ("list", ";") and len(effect) > 1:
        last, shown = _without_display(effect[-1], only_looks=only_looks)
        return (*effect[:-1], last), shown
    if effect[0] != "|":
        return effect, None
    shown = _lines_shown(effect[-1])
    if shown is None or (shown[0] == 1 and not only_looks):
        return effect, None
    return (effect[1] if len(effect) == 3 else effect[:-1]), shown


def _lines_shown(form: Form) -> Lines | None:
    """Return the lines that `head` or `tail` without operands shows; `None` for anything else."""
    if form[0] != "command" or form[1] or form[3] or len(form[2]) != 2:
        return None
    program, flags = form[2]
    if program not in ("head", "tail") or len(flags) > 1:
        return None
    kind, number = flags[0] if flags and len(flags[0]) == 2 else ("lines", "10")
    digits = number.lstrip("+-")
    if (flags and len(flags[0]) != 2) or kind not in ("lines", "bytes") or not digits.isdigit():
        return None
    if program == "head" and number[0] == "-":
        return (1, _LAST_LINE)
    if program == "tail" and number[0] == "+":
        return (float(digits), _LAST_LINE) if kind == "lines" else None
    n_lines = min(float(digits), _LAST_LINE) if kind == "lines" else 1.0
    if not n_lines:
        return None
    return (1, n_lines) if program == "head" else (_LAST_LINE - n_lines + 1, _LAST_LINE)


def _inside(node: Node) -> list[Node]:
    return node.children[1:-1]


def _redirected(form: Form, redirects: tuple[Form, ...]) -> Form:
    if not redirects:
        return form
    if form[0] == "command":
        return (*form[:3], form[3] + redirects)
    return ("redirected", form, redirects)


_READERS: dict[str, Callable[[_Reader, Node, int], Form]] = {
    "command": _Reader.command,
    **dict.fromkeys(CHAIN, _Reader.chain),
    "variable_assignment": _Reader.assignments,
    "variable_assignments": _Reader.assignments,
    "subshell": _Reader.subshell,
    "compound_statement": _Reader.group,
}


def glued(parts: list[str], *, n_pieces: int = 2) -> str:
    """Join the pieces of one word. A bare `~` means the home folder only alone or before a slash."""
    word = "".join(parts).replace(f"{ACTIVE}{{{ACTIVE}}}", "{}")
    bare_tilde = next((part for part in parts if part), "") == f"{ACTIVE}~"
    return f"{ACTIVE}~{QUOTED}{word[2:]}" if bare_tilde and n_pieces > 1 else word


def _double_quoted(text: str) -> str:
    r"""Return text between double quotes: a backslash is an escape only before ``$ ` " \\`` and newline."""
    return re.sub(r'\\([$`"\\])|\\\n', lambda match: match[1] or "", text) if "\\" in text else text
