"""A replica that is killed, or comes late, goes on where the run is."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from trainer.data.dataset import load_preference_data
from trainer.diloco import (
    FileStore,
    MemoryStore,
    OuterReplica,
    OuterSettings,
    ParameterVector,
    outer_preset,
)
from trainer.diloco.callback import ObjectStoreLoop
from trainer.diloco.codecs import unseal_tensors
from trainer.diloco.environment import ReplicaPlace
from trainer.diloco.protocol import Manifest, manifest_key
from trainer.diloco.replica import newest_state
from trainer.engines.settings_file import read_settings
from trainer.engines.trl.run import RunParts, run
from trainer.model.loading import load_model, load_tokenizer

pytestmark = pytest.mark.slow

N_STEPS, ROUND = 6, 2


class Killed(BaseException):
    """The process is gone."""


class MortalStore(FileStore):
    """A folder whose n-th request kills who makes it: before it, or after it was carried out."""

    def __init__(self, root, fatal=None, *, is_carried_out=False):
        super().__init__(root)
        self.fatal, self.is_carried_out = fatal, is_carried_out
        self.numbers = itertools.count()

    def _asked(self, verb, key, request):
        is_fatal = next(self.numbers) == self.fatal
        if is_fatal and not self.is_carried_out:
            raise Killed
        answer = super()._asked(verb, key, request)
        if is_fatal:
            raise Killed
        return answer


def train(dataset, output: Path, store, *, world_size=1, rank=0, tiny=None, **outer):
    config = read_settings(
        {
            "dataset": str(dataset),
            "output": str(output),
            "outer": "object_store",
            "outer_options": {
                "sync_every": ROUND, "codec": "ternary", "quorum": 1, "first_grace_s": 0.05,
                "rounds": "synchronous", **outer,
            },
            "tiny": {"hidden_size": 32, "vocab_size": 512, **(tiny or {})},
            "evaluation": {"max_prompts": 0},
            "trl": {
                "max_steps": N_STEPS, "lr_scheduler_type": "cosine", "warmup_steps": 4,
                "learning_rate": 5e-3, "teacher": "ema", "teacher_ema_rate": 0.2,
                "sdpo_wrapper": "taid", "logging_steps": 1, "alpha_sdpo": 0.5, "beta_replay": 0.3,
            },
        }
    )  # fmt: skip
    place = ReplicaPlace(rank, world_size)
    return run(config, parts=RunParts(place=place, store=store))


class OtherReplica:
    """Rank 0 of two, whose parameters are those of the run that `train` makes."""

    def __init__(self, dataset, output, store, *, rounds="synchronous", n_rounds=3):
        config = read_settings(
            {
                "dataset": str(dataset), "output": str(output),
                "tiny": {"hidden_size": 32, "vocab_size": 512},
            }
        )  # fmt: skip
        tokenizer = load_tokenizer(config, load_preference_data(config.dataset))
        model = load_model(config, tokenizer, seed=42)
        view = ParameterVector(model)
        settings = OuterSettings(
            rounds=rounds, codec="ternary", outer=outer_preset("average"), n_rounds=n_rounds,
            signature=view.signature, quorum=1, first_grace_s=0.05,
        )  # fmt: skip
        self.replica = OuterReplica(store, view.read(), rank=0, world_size=2, settings=settings)
        self.replica.join()

    def make_rounds(self, n):
        for _ in range(n):
            noise = np.random.default_rng(self.replica.round_id).standard_normal(
                self.replica.theta.size
            )
            self.replica.exchange(self.replica.theta + 1e-4 * noise.astype(np.float32))


def rows_of(output: Path) -> list[dict]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {k: v for k, v in row.items() if "time" not in k and "wait" not in k and "_bytes" not in k}
        for row in rows
        if "train/train_runtime" not in row
    ]


@pytest.fixture(scope="module")
def undisturbed(dataset_folder, tmp_path_factory):
    """A run that nobody kills, and how many requests it makes."""
    output = tmp_path_factory.mktemp("undisturbed")
    store = MortalStore(output / "store")
    train(dataset_folder, output, store)
    return output, next(store.numbers)


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_killed_at_a_request_it_starts_again_at_the_round_of_the_run(
    dataset_folder, tmp_path, undisturbed, share
):
    calm, n_requests = undisturbed
    store = MortalStore(tmp_path / "store", min(int(share * n_requests), n_requests - 1))
    with pytest.raises(Killed):
        train(dataset_folder, tmp_path, store)
    assert len(MortalStore(tmp_path / "store").keys("rounds/")) <= N_STEPS // ROUND
    assert train(dataset_folder, tmp_path, MortalStore(tmp_path / "store"))["steps"] == N_STEPS
    rates = {row["step"]: row["train/learning_rate"] for row in rows_of(tmp_path)}
    usual = {row["step"]: row["train/learning_rate"] for row in rows_of(calm)}
    assert rates.items() <= usual.items()
    assert 1 in rates
    assert not list(tmp_path.glob("steps/checkpoint-*")), "nobody has asked for checkpoints"


def test_replicas_of_a_tiny_model_start_from_equal_weights_on_unequal_shards(
    dataset_folder, tmp_path
):
    starts = set()
    for rank in range(2):
        output = tmp_path / str(rank)
        # The second request writes the run's description: nothing after it matters here.
        store = MortalStore(output / "store", 1, is_carried_out=True)
        with pytest.raises(Killed):
            train(
                dataset_folder, output, store,
                world_size=2, rank=rank, tiny={"pretraining_steps": 1, "n_layers": 1},
            )  # fmt: skip
        starts.add(unseal_tensors(store.get("run.safetensors"))[0]["base"])
    assert len(starts) == 1, "whoever came first would decide what all train"


class BusyStore(MemoryStore):
    """Calls `other` once, when somebody asks for the first manifest after the run has begun."""

    other, is_open = None, False

    def get(self, key):
        if self.is_open and self.other and key == manifest_key(0):
            other, self.other = self.other, None
            other()
        return super().get(key)


def test_an_asynchronous_replica_takes_up_others_progress_between_its_steps(
    dataset_folder, tmp_path, monkeypatch
):
    store = BusyStore()
    other = OtherReplica(dataset_folder, tmp_path, store, rounds="asynchronous", n_rounds=1)
    began = other.replica.theta.copy()
    store.other = lambda: other.replica.exchange(other.replica.theta + np.float32(0.5))
    begin = ObjectStoreLoop.on_train_begin

    def on_train_begin(loop, *arguments, **context):
        store.is_open = True
        begin(loop, *arguments, **context)

    monkeypatch.setattr(ObjectStoreLoop, "on_train_begin", on_train_begin)
    train(
        dataset_folder, tmp_path, store, world_size=2, rank=1, rounds="asynchronous",
        sync_every=N_STEPS,
    )  # fmt: skip
    theirs, ours = (Manifest.from_bytes(store.get(manifest_key(n))) for n in range(2))
    assert (theirs.by, ours.by) == (0, 1)
    assert ours.contributions[0].base == ours.base != theirs.base, "no older than its last step"
    _, theta, _ = newest_state(store)
    moved = theta - began
    assert 0.2 < np.median(moved) < 0.3, "the other's half step, and a little of its own"


def test_a_late_replica_takes_up_the_runs_step_schedule_and_weights(
    dataset_folder, tmp_path, undisturbed
):
    calm, _ = undisturbed
    store = MemoryStore()
    OtherReplica(dataset_folder, tmp_path / "other", store).make_rounds(2)
    train(dataset_folder, tmp_path, store, world_size=2, rank=1)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [5, 6]
    usual = {row["step"]: row["train/learning_rate"] for row in rows_of(calm)}
    assert [row["train/learning_rate"] for row in rows] == [usual[5], usual[6]]
