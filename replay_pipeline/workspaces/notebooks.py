"""Edit the cells of a notebook as the client's NotebookEdit does."""

import json
import re
from collections.abc import Mapping
from typing import Any

_NUMBERED = re.compile(r"cell-(\d+)")


class NotebookError(ValueError):
    """Raised for an edit that can't be applied, with the client's message."""


def edited(text: str, arguments: Mapping[str, Any]) -> str:
    """Return a notebook after one edit.

    Args:
        text: the notebook's JSON.
        arguments: `new_source`, `cell_id`, `cell_type` and `edit_mode` of the call.

    Raises:
        NotebookError: the text is no notebook, or there is no such cell.
    """
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotebookError("Notebook is not valid JSON.") from error
    mode, cell_id = arguments.get("edit_mode") or "replace", arguments.get("cell_id")
    at = 0 if cell_id is None else _position(cells, str(cell_id))
    if mode == "delete":
        del cells[at]
    elif mode == "insert":
        if arguments.get("cell_type") not in {"code", "markdown"}:
            raise NotebookError("Cell type is required when using edit_mode=insert.")
        cells.insert(at + (cell_id is not None), _cell(arguments, notebook))
    else:
        if at >= len(cells):
            raise NotebookError(f'Cell with ID "{cell_id}" not found in notebook.')
        cell = cells[at]
        cell["source"] = arguments["new_source"]
        if cell.get("cell_type") == "code":
            cell["execution_count"], cell["outputs"] = None, []
        if arguments.get("cell_type"):
            cell["cell_type"] = arguments["cell_type"]
    return json.dumps(notebook, indent=1, ensure_ascii=False)


def _position(cells: list[dict[str, Any]], cell_id: str) -> int:
    for at, cell in enumerate(cells):
        if cell.get("id") == cell_id:
            return at
    match = _NUMBERED.fullmatch(cell_id)
    if match and int(match[1]) < len(cells):
        return int(match[1])
    raise NotebookError(f'Cell with ID "{cell_id}" not found in notebook.')


def _cell(arguments: Mapping[str, Any], notebook: Mapping[str, Any]) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": arguments["cell_type"]}
    if (notebook.get("nbformat", 4), notebook.get("nbformat_minor", 0)) >= (4, 5):
        cell["id"] = "new"
    cell |= {"metadata": {}, "source": arguments["new_source"]}
    if cell["cell_type"] == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell
