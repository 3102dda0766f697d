"""Reference numbers in `tests/data/losses`: what other implementations made of the same inputs."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).parents[1] / "data" / "losses"


def cases(file: str) -> Any:
    return json.loads((DATA / f"{file}.json").read_text("utf-8"))


@cache
def _arrays(file: str) -> Any:
    return np.load(DATA / f"{file}.npz")


def tensor(file: str, name: str) -> Tensor:
    return torch.from_numpy(np.array(_arrays(file)[name]))
