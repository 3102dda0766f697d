"""Read words from the syntax tree: quoting, paths, assignments, and redirections."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from tree_sitter import Node

from replay_pipeline.actions.paths import absolute
from replay_pipeline.actions.shell_syntax import UnreadableError
from replay_pipeline.actions.shell_words import ACTIVE, QUOTED, unquoted

Form = tuple[Any, ...]
"""A normalized piece of syntax. Equal forms have equal effects."""

MAX_DEPTH = 40
_PLAIN_WORDS = frozenset(
    ["word", "number", "variable_name", "special_variable_name", "test_operator", "file_descriptor"]
)


class WordReader(ABC):
    """The reader of the words in one syntax tree. It tracks the directory that each command runs in.

    Args:
        source: the command.
        cwd: folder in which it runs.
    """

    def __init__(self, source: bytes, cwd: str | None) -> None:
        self.source = source
        self.cwd = absolute(cwd, None) if cwd else None
        self.folder = self.cwd
        self.only_looks = self.keeps_files = True

    @abstractmethod
    def substitution(self, node: Node, depth: int) -> str:
        """Return the marker for a command inside a word."""

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
        """Return a word with quoting resolved and active characters marked (see `shell_words`).

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


def glued(parts: list[str], *, n_pieces: int = 2) -> str:
    """Join the pieces of one word. A bare `~` means the home folder only alone or before a slash."""
    word = "".join(parts).replace(f"{ACTIVE}{{{ACTIVE}}}", "{}")
    bare_tilde = next((part for part in parts if part), "") == f"{ACTIVE}~"
    return f"{ACTIVE}~{QUOTED}{word[2:]}" if bare_tilde and n_pieces > 1 else word


def _double_quoted(text: str) -> str:
    r"""Return text between double quotes: a backslash is an escape only before ``$ ` " \\`` and newline."""
    return re.sub(r'\\([$`"\\])|\\\n', lambda match: match[1] or "", text) if "\\" in text else text
