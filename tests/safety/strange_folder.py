"""A folder that a stranger has filled: modules with the names that the program and its packages use."""

from pathlib import Path

NAMES = (
    "trainer", "torch", "datasets", "gql", "dagster", "replay_pipeline", "yaml", "transformers", "trl",
    "pyarrow", "data_juicer", "ray", "uvicorn", "starlette", "sitecustomize", "usercustomize",
)  # fmt: skip
_CODE = "from pathlib import Path\nPath({ran!r}).open('a').write(__name__ + ' ')\n"


def fill(folder: Path) -> Path:
    """Put the modules there; returns the file that says which of them ran, once one has."""
    folder.mkdir(parents=True, exist_ok=True)
    ran = folder.parent / f"{folder.name}-ran.txt"
    for name in NAMES:
        (folder / f"{name}.py").write_text(_CODE.format(ran=str(ran)))
    return ran
