"""Versions of the code that decides what a stage writes, so that results of older code are found.

A version is a digest of source files without comments, docstrings, and layout. A number that people
raise by hand would be forgotten for just the change that matters. The drawback: a code change that
changes no row still makes its stages run again. That takes time but no money, and if a stage writes
the same bytes, later stages don't run.

Code that only moves rows isn't included (storage, the ledger, HTTP, Dagster). Paid answers are
stored by the hash of their request, which covers the whole question.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PARTS: dict[str, tuple[str, ...]] = {
    "session readers": (
        "ingesters/**/*",
        "!ingesters/__init__.py",
        "!ingesters/one_session.py",
        "!ingesters/traces.py",
        "!ingesters/batches.py",
        "!ingesters/kept_bytes.py",
        "!ingesters/surroundings.py",
    ),
    "secret rules": ("redaction/**/*", "!redaction/printable.py", "kingfisher-secret-scanner"),
    "prompts": (
        "ingesters/traces.py",
        "ingesters/attachments.py",
        "ingesters/surroundings.py",
        "ingesters/tool_schemas.py",
        "ingesters/wire.py",
        "ingesters/known_tools*",
        "harness/__init__.py",
        "harness/harness.py",
        "harness/neutral.py",
        "actions/windows.py",
    ),
    "requests": (
        "replay/dialects/**/*",
        "!replay/dialects/client.py",
        "!replay/dialects/endpoints.py",
        "!replay/dialects/prices.py",
        "!replay/dialects/replies.py",
        "!replay/dialects/sizes.py",
    ),
    "gates": (
        "replay/buy/policy.py",
        "replay/buy/places.py",
        "replay/buy/buying.py",
        "judge/**/*",
        "types.py:FAILURES",
    ),
    "matcher": (
        "actions/**/*",
        "!actions/windows.py",
        "types.py:family_of_model",
        "families.toml",
        "tree-sitter-bash",
    ),
    "pairs": (
        "judge/**/*",
        "workspaces/**/*",
        "stages/trials.py",
        "pages/pairs.py",
        "storage/pair_rows.py",
        "types.py:FAILURES",
    ),
    "normalizer": (
        "normalize/**/*",
        "!normalize/recipes/**/*",
        "judge/**/*",
        "py-data-juicer",
    ),
    "publisher": (
        "publish/**/*",
        "judge/**/*",
        "stages/audit/**/*",
        "ingesters/fidelity.py",
        "ingesters/base.py",
    ),
}
"""The parts that can change, by a readable name: files of this package (`!` excludes some), single
constants and functions, and the installed versions of other packages."""

_PACKAGE = Path(__file__).parents[1]
_NOT_CODE = frozenset({".md", ".pyc"})


def versions_of(parts: Iterable[str | Callable[..., Any]]) -> dict[str, str]:
    """Return a digest of each part of the code.

    The first call reads the sources, which takes some hundredths of a second.

    Args:
        parts: names in `PARTS`, or functions whose source to digest.
    """
    return {
        part if isinstance(part, str) else part.__name__: (
            _digest_of(part) if isinstance(part, str) else _digest_of_function(part)
        )
        for part in parts
    }


def _digest_of_function(function: Callable[..., Any]) -> str:
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return hashlib.blake2b(_spelled(source), digest_size=8).hexdigest()


@cache
def _digest_of(part: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in PARTS[part]:
        file, _, constant = name.partition(":")
        if constant:
            tree = ast.parse((_PACKAGE / file).read_bytes())
            digest.update(_spelled([node for node in tree.body if _names(node, constant)]))
        elif not name.endswith(("*", ".py", ".toml")):
            digest.update(f"{name} {_installed(name)}\0".encode())
    for path in _files_of(part):
        content = path.read_bytes()
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(_spelled(ast.parse(content)) if path.suffix == ".py" else content)
    return digest.hexdigest()


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # an extra: its stage says so when it is run
        return ""


def _files_of(part: str) -> list[Path]:
    found: set[Path] = set()
    for pattern in PARTS[part]:
        if pattern.startswith("!"):
            found -= set(_PACKAGE.glob(pattern[1:]))
        else:
            found |= set(_PACKAGE.glob(pattern))
    return sorted(path for path in found if path.is_file() and path.suffix not in _NOT_CODE)


def _names(node: ast.stmt, constant: str) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == constant
    targets = [getattr(node, "target", None), *getattr(node, "targets", ())]
    return any(isinstance(each, ast.Name) and each.id == constant for each in targets)


def _spelled(tree: object) -> bytes:
    words: list[str] = []
    _spell(tree, words)
    return "\0".join(words).encode("utf-8", "surrogatepass")


def _spell(node: object, words: list[str]) -> None:
    """Spell a syntax tree so that neither layout nor the version of Python shows in it.

    Fields that hold nothing are left out: newer versions of Python add some.
    """
    if isinstance(node, ast.AST):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring, of a module, a function or an attribute
        words.append(type(node).__name__)
        for name in node._fields:
            if (value := getattr(node, name, None)) not in (None, []):
                words.append(name)
                _spell(value, words)
    elif isinstance(node, list):
        words.append("[")
        for item in node:
            _spell(item, words)
        words.append("]")
    else:
        words.append(repr(node))
