"""What the site needs beyond the pages of this folder; mkdocs calls it.

Pages of the repository's root are taken into the site, and a link to a file that is not in the site
becomes the file's name.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
_FROM_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


_IMAGE_OF_DOCS = re.compile(r"(!\[[^\]]*\]\()docs/")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, source in _FROM_ROOT.items():
        text = (_ROOT / source).read_text("utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Rewrite links that leave the site."""
    in_site = {source: name for name, source in _FROM_ROOT.items()}
    is_root_page = page.file.src_uri in _FROM_ROOT
    if is_root_page:
        markdown = _IMAGE_OF_DOCS.sub(r"\1", markdown)

    def rewritten(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        base = PurePosixPath() if is_root_page else PurePosixPath("docs", page.file.src_uri).parent
        path = _normal(base / target)
        if path in in_site:
            inside = in_site[path]
        elif path.startswith("docs/") and files.get_file_from_path(path.removeprefix("docs/")):
            inside = path.removeprefix("docs/")
        else:
            return f"{text} (`{path}`)" if path != text.strip("`") else f"`{path}`"
        here = PurePosixPath(page.file.src_uri).parent
        up = "../" * len(here.parts)
        return f"[{text}]({up}{inside}{anchor})"

    return _LINK.sub(rewritten, markdown)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
