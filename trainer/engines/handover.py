"""The common parts of engines that train in their own programs, from files that we write."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from trainer.data.preflight import look_at_pairs
from trainer.data.rendering import Renderer
from trainer.data.sampler import PairSampler, weight_of
from trainer.engines.capabilities import check
from trainer.errors import DatasetError, TrainerConfigError
from trainer.settings import RunConfig, SharedSettings


def check_startable(settings: RunConfig) -> None:
    """Check that the engine supports the settings, and that all needed settings are there.

    Raises:
        TrainerConfigError: a setting isn't supported, or one is missing.
    """
    title = check(settings).title
    if settings.model is None:
        raise TrainerConfigError(f"{title} loads a model from disk or the Hub: set model")
    if settings.shared.max_steps < 1:
        raise TrainerConfigError(f"{title} counts in steps: set trl.max_steps")


def make_renderer(settings: RunConfig) -> Renderer:
    """Build the renderer for the model's own tokenizer, with the same cuts as under TRL."""
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    return Renderer(tokenizer=tokenizer, **settings.shared.rendering)


def require_hints(settings: RunConfig, n_hints: int) -> None:
    """Check that channel 2 has hints to learn from, if it has a weight.

    Raises:
        DatasetError: no row has a hint.
    """
    alpha = settings.shared.alpha_sdpo
    if alpha > 0 and n_hints == 0:
        raise DatasetError(
            f"{settings.dataset}: no row has a hint, and alpha_sdpo={alpha}: set it to 0, or "
            "publish the column `hint`"
        )


def n_states_of_step(shared: SharedSettings, *, n_ranks: int = 1) -> int:
    """Return the number of states in one step. Each gives a group of rollouts.

    Raises:
        TrainerConfigError: the rollouts of a step do not fill whole groups.
    """
    n_rollouts = shared.per_device_train_batch_size * shared.gradient_accumulation_steps * n_ranks
    if n_rollouts % shared.num_generations:
        raise TrainerConfigError(
            f"{n_rollouts} rollouts a step is not a multiple of trl.num_generations="
            f"{shared.num_generations}: change trl.per_device_train_batch_size"
        )
    return n_rollouts // shared.num_generations


logger = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("chosen_ids", pa.list_(pa.int32())),
        ("rejected_ids", pa.list_(pa.int32())),
        ("weight", pa.float64()),
        ("session_id", pa.string()),
    ]
)


def write_pairs(path: Path, rows: Sequence[Mapping[str, Any]], renderer: Renderer) -> int:
    """Render the rows of `pairs`, and return their number.

    Raises:
        DatasetError: there is no usable pair.
    """
    usable, n_identical, n_empty, _ = look_at_pairs(renderer, rows)
    if n_identical or n_empty:
        logger.warning(
            "%d of %d pairs have two identical sides and %d an empty one: left out",
            n_identical,
            len(rows),
            n_empty,
        )
    fitting = fitting_rows([rows[i] for i in usable], renderer)
    if not fitting:
        raise DatasetError("there is no usable pair: turn channel 3 off (trl.beta_replay=0)")
    columns = [
        {
            "prompt_ids": renderer.row_prompt_ids(row),
            "chosen_ids": renderer.side_ids(row, "chosen"),
            "rejected_ids": renderer.side_ids(row, "rejected"),
            "weight": weight_of(row),
            "session_id": row.get("session_id"),
        }
        for row in fitting
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(columns, schema=SCHEMA), path, compression="zstd")
    return len(columns)


def fitting_rows(rows: Sequence[Any], renderer: Renderer) -> list[Any]:
    """Return the rows whose prompt can keep its required parts, and log the number of the others."""
    cuts = [renderer.row_prompt(row)[1] for row in rows]
    if refusals := [cut.refusal for cut in cuts if cut.refusal]:
        logger.warning("%d of %d rows left out: %s", len(refusals), len(rows), refusals[0])
    return [row for row, cut in zip(rows, cuts, strict=True) if not cut.refusal]


@dataclass(frozen=True, kw_only=True)
class PairPart:
    """The pairs of one rank in one step. All ranks have equally many, some with weight 0."""

    indices: tuple[int, ...]
    weights: tuple[float, ...]
    total_weight: float
    """Sum of the step's weights over all ranks."""


class TokenizedPairs:
    """The pairs that `write_pairs` wrote."""

    def __init__(self, path: str | Path) -> None:
        """Read the file.

        Raises:
            DatasetError: it is not there, or holds no pair.
        """
        path = Path(path)
        if not path.is_file():
            raise DatasetError(
                f"{path}: no tokenized pairs; every worker must reach the run's output folder"
            )
        self.rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        if not self.rows:
            raise DatasetError(f"{path} holds no pair: turn channel 3 off (trl.beta_replay=0)")
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
        self._samplers: dict[tuple[int, int], PairSampler] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def sampler(self, *, batch_size: int, seed: int) -> PairSampler:
        """Make the sampler of the pairs for optimizer steps. Pairs of one session stay together."""
        if (batch_size, seed) not in self._samplers:
            groups = [row["session_id"] or i for i, row in enumerate(self.rows)]
            self._samplers[batch_size, seed] = PairSampler(
                len(self), batch_size=batch_size, seed=seed, groups=groups
            )
        return self._samplers[batch_size, seed]

    def part(self, drawn: Sequence[int], *, rank: int, n_ranks: int, multiple: int) -> PairPart:
        """Return the part of `rank` in the pairs of a step.

        Collective operations need equally many passes on every rank, of `multiple` pairs each.
        Short parts are filled up with pairs of weight 0.
        """
        mine = list(drawn[len(drawn) * rank // n_ranks : len(drawn) * (rank + 1) // n_ranks])
        longest = -(-len(drawn) // n_ranks)
        padded = -(-longest // multiple) * multiple
        filler = padded - len(mine)
        weights = [self.rows[i]["weight"] for i in mine] + [0.0] * filler
        return PairPart(
            indices=tuple(mine + [drawn[0]] * filler),
            weights=tuple(weights),
            total_weight=sum(self.rows[i]["weight"] for i in drawn),
        )

    def tensors(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return padded rows (chosen, rejected, chosen, …), with prompts padded on the left and responses on the right."""
        rows = [(self.rows[i], f"{side}_ids") for i in indices for side in ("chosen", "rejected")]
        prompts = [torch.tensor(row["prompt_ids"]) for row, _ in rows]
        responses = [torch.tensor(row[name]) for row, name in rows]
        ids_BT = _joined(prompts, responses)
        mask_BT = _joined(
            *([torch.ones_like(ids) for ids in side] for side in (prompts, responses))
        )
        n_prompt = max(map(len, prompts))
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT,
            "prompts": ids_BT[:, :n_prompt],
            "responses": ids_BT[:, n_prompt:],
            "response_mask": mask_BT[:, n_prompt:],
            "position_ids": (mask_BT.cumsum(-1) - 1).clamp_min(0),
        }


def _joined(prompts: list[Tensor], responses: list[Tensor]) -> Tensor:
    return torch.cat(
        [pad_sequence(prompts, True, padding_side="left"), pad_sequence(responses, True)], 1
    )


def read_reference(path: str | Path, pairs: TokenizedPairs) -> list[list[float]] | None:
    """Read the reference log-probs of both sides of every pair, or return None if the file lacks them."""
    path = Path(path)
    if not path.is_file():
        return None
    kept = json.loads(path.read_text("utf-8"))
    return kept["logps"] if kept["pairs"] == pairs.fingerprint else None


def write_reference(path: str | Path, pairs: TokenizedPairs, logps: list[list[float]]) -> None:
    """Write the summed log-probs under the first weights of a run, so that a resumed run can read them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pairs": pairs.fingerprint, "logps": logps}), "utf-8")
