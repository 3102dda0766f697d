"""Parse a shell command into a syntax tree, in bounded time."""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Tree

_SHORT_BYTES = 250
_MAX_REPORTS = 60
"""Steps of the parser, in its own unit; real commands take up to three."""

_PARSER = Parser(Language(tree_sitter_bash.language()))
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
    if len(source) <= _SHORT_BYTES:
        return _PARSER.parse(source)
    n_reports = count()
    gives_up = lambda _, has_error: has_error or next(n_reports) >= _MAX_REPORTS  # noqa: E731
    _PARSER.reset()
    try:
        return _PARSER.parse(lambda offset, _point: source[offset:], progress_callback=gives_up)
    except ValueError as error:
        raise UnreadableError from error
    finally:
        _PARSER.reset()


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
