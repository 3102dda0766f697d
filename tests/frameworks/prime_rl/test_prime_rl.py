"""The real package: its configuration classes, orchestrator, train sink, packer and loss."""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import prime_rl.orchestrator.algo.base as hooks
import pytest
import torch
import verifiers.v1 as vf
import yaml
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.orchestrator.envs import TrainEnvs
from prime_rl.orchestrator.packing import BatchPacker
from prime_rl.orchestrator.train_sink import TrainSink
from prime_rl.orchestrator.types import Progress
from prime_rl.orchestrator.utils import setup_policy_inference_pool
from prime_rl.trainer.rl.data import DataLoader
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
from prime_rl.utils import client
from prime_rl.utils.config import cli
from transformers import AutoModelForCausalLM, AutoTokenizer
from verifiers.v1.graph import MessageNode
from verifiers.v1.types import AssistantMessage, UserMessage

from trainer.__main__ import main
from trainer.engines.handover import TokenizedPairs
from trainer.engines.prime_rl import register
from trainer.errors import AlignmentError, DatasetError, TrainerConfigError
from trainer.losses.channels import (
    VARIANTS,
    ReplayOptions,
    replay_per_pair,
    sampled_reverse_kl_per_token,
)

HINT = "Error: file has not been read yet"
ALPHA, BETA, POLICY = 0.2, 0.7, 0.5
GROUP = 4


def settings_file(folder: Path, dataset: Path, model: Path, **trl: Any) -> Path:
    """Two states of four rollouts a step, and four pairs."""
    shared = {
        "objective": "grpo",
        "alpha_sdpo": ALPHA,
        "sdpo_estimator": "sampled",
        "jsd_beta": 1.0,
        "beta_replay": BETA,
        "policy_weight": POLICY,
        "dpo_variant": "dpo",
        "dpo_beta": 0.3,
        "max_steps": 7,
        "num_generations": GROUP,
        "per_device_train_batch_size": 2 * GROUP,
        "pairs_per_step": 4,
        "max_prompt_tokens": 96,
        "prompt_window": "tail",
        "max_response_tokens": 32,
        "render_tools": False,
        "seed": 5,
    }
    values = {
        "dataset": str(dataset),
        "output": str(folder / "out"),
        "model": str(model),
        "rollouts": "generate",
        "trl": shared | trl,
        "engines": {"prime_rl": {"orchestrator.renderer.name": "default"}},
    }
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def prepared(tmp_path, dataset, model, capsys):
    """A function from settings to the file that `replay-train prime_rl` writes."""

    def prepare(**trl: Any) -> Path:
        assert (
            main(["prime_rl", "--config", str(settings_file(tmp_path, dataset, model, **trl))]) == 0
        )
        report = json.loads(capsys.readouterr().out)
        return Path(report["config"])

    return prepare


def parsed(path: Path) -> RLConfig:
    """What PRIME-RL's own command line makes of the file."""
    return cli(RLConfig, args=["@", str(path)])


class Run:
    """PRIME-RL's orchestrator up to the trainer's loss, on a policy that a test can differentiate.

    Only the call to vLLM is answered here: its scores are the policy's own.
    """

    def __init__(self, path: Path, monkeypatch: Any, *, lose: int = 0) -> None:
        self.config: OrchestratorConfig = parsed(path).orchestrator
        name = self.config.model.name
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64)
        self.tokenizer = AutoTokenizer.from_pretrained(name)

        async def prefill_logprobs(openai, model, token_ids):
            with torch.no_grad():
                return self.logprobs(token_ids).tolist()[lose:]

        monkeypatch.setattr(client, "prefill_logprobs", prefill_logprobs)

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of every token given all before it; 0 for the first."""
        logps = self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        picked = logps.gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        return torch.cat([picked.new_zeros(1), picked])

    async def start(self) -> TrainSink:
        renderer, pool = await setup_policy_inference_pool(
            config=self.config, tokenizer=self.tokenizer
        )
        envs = TrainEnvs(
            self.config.train.source,
            self.config.env_addresses,
            policy_pool=pool,
            renderer_config=self.config.renderer,
        )
        self.algorithm = envs.get("replay").algorithm
        await self.algorithm.setup()
        self.renderer = renderer
        return TrainSink(
            self.config,
            tokenizer=self.tokenizer,
            train_envs=envs,
            mm_token_type_ids_mapping=None,
            progress=Progress(),
            batch_size=self.config.batch_size,
            token_batch_size=None,
        )

    def episode(self, group: str, seed: int, reward: float, hint: str | None) -> vf.WireEpisode:
        """One rollout of an environment's server, as it comes off the wire."""
        generator = torch.Generator().manual_seed(seed)
        n_tokens = self.model.config.vocab_size
        ids = torch.randint(n_tokens, (9 + seed % 3,), generator=generator).tolist()
        with torch.no_grad():
            logprobs = self.logprobs(ids)[4:].tolist()
        task: Any = {
            "type": "ReplayTask",
            "data": {"idx": 0, "hint": hint},
            "key": f"state {group}",
        }
        trace = {
            "task": task,
            "agent": {"config": {"harness": {"id": "replay_states"}}},
            "ok": True,
            "rewards": {"consensus_reward": {"score": reward}},
            "nodes": [
                MessageNode(
                    message=UserMessage(content="u"), token_ids=ids[:4], mask=[False] * 4
                ).model_dump(),
                MessageNode(
                    parent=0,
                    message=AssistantMessage(content="a"),
                    sampled=True,
                    token_ids=ids[4:],
                    mask=[True] * (len(ids) - 4),
                    logprobs=logprobs,
                ).model_dump(),
            ],
        }
        return vf.WireEpisode.model_validate(
            {
                "env": {"id": "replay_states", "name": "replay"},
                "task": task,
                "group": {"id": group},
                "ok": True,
                "run": {"type": "train", "id": "r", "work": {"type": "train", "step": 1}},
                "traces": [trace],
            }
        )

    def trained(self, samples: list[Any]) -> tuple[torch.Tensor, list[list[int]]]:
        """The trainer's loss on the packed samples, and the sequences that it was computed on."""
        loader = DataLoader.__new__(DataLoader)  # its constructor waits for a transport
        (packed,) = BatchPacker(self.config).pack(samples)
        batches: list[Any] = [loader._micro_batch_to_tensor(batch) for batch in packed]
        scales = {"rl": 0, "ce": 0, "ref_kl": 0}
        for batch in batches:
            rl = batch["rl_weights"]
            scales["rl"] += int((batch["loss_mask"] & (True if rl is None else rl != 0)).sum())
            for name in ("ce", "ref_kl"):
                if batch[f"{name}_weights"] is not None:
                    scales[name] += int((batch[f"{name}_weights"] != 0).sum())
        total, seen = torch.zeros((), dtype=torch.float64), []
        for batch in batches:
            lengths = batch["sequence_lengths"]
            columns = {
                name: None
                if batch[name] is None
                else [
                    # Double only because the policy is; the values are the float32 that were sent.
                    column.double() if column.is_floating_point() else column
                    for column in batch[name].squeeze(0).split(lengths)
                ]
                for name in (
                    "inference_logprobs",
                    "ref_logprobs",
                    "advantages",
                    "loss_mask",
                    "rl_weights",
                    "ce_weights",
                    "ref_kl_weights",
                )
            }
            sequences = [ids.tolist() for ids in batch["input_ids"].squeeze(0).split(lengths)]
            seen += sequences
            loss, _ = compute_loss(
                trainer_logprobs=[self.logprobs(ids) for ids in sequences],
                rl_loss_fn=setup_rl_loss_fn(DefaultLossConfig()),
                **{f"{name}_scale": max(scale, 1) for name, scale in scales.items()},
                **columns,
            )
            total = total + loss
        return total, seen

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)
        return torch.cat([part.flatten() for part in parts if part is not None])


REWARDS = (1.0, 0.0, 0.25, 0.5)
HINTS = (HINT, None, HINT, HINT)


async def one_step(run: Run, n_groups: int = 2) -> tuple[TrainSink, Any, list[vf.WireEpisode]]:
    """A step's groups through the real sink: gives the batch that it ships."""
    sink, episodes, batch = await run.start(), [], None
    for group in range(n_groups):
        name = uuid.uuid4().hex
        for k in range(GROUP):
            assert batch is None, "shipped before the step's groups were in"
            # The same lengths in every group: the mean over groups is then the exact count.
            episode = run.episode(name, k + GROUP * 3 * group, REWARDS[k], HINTS[k])
            episodes.append(episode)
            batch = await sink.add(episode)
    return sink, batch, episodes


def of_agent(episodes: list[vf.WireEpisode], *, is_replayed: bool) -> list[Any]:
    traces = [trace for episode in episodes for trace in episode.traces]
    return [trace for trace in traces if (trace.agent.name == "replayed_pair") == is_replayed]


def core_loss(run: Run, rollouts: list[Any], n_rl_tokens: int, pairs: Any, variant: str):
    """The three channels written with the loss core."""
    surrogate, kl, n_kl = torch.zeros(()), torch.zeros(()), 0
    mean = sum(REWARDS) / len(REWARDS)
    for trace in rollouts:
        (branch,) = trace.branches
        logprobs = run.logprobs(branch.token_ids)[4:]
        ratio = (logprobs - logprobs.detach()).exp()
        surrogate = surrogate - POLICY * ((trace.reward - mean) * ratio).sum()
        if trace.task.data.hint is not None:
            text = "A file must be read before it is edited or written. Read it first."
            before = run.renderer.render_ids(
                [{"role": "system", "content": text}], add_generation_prompt=False
            )
            with torch.no_grad():
                teacher = run.logprobs([*before, *branch.token_ids])[len(before) + 4 :]
            kl = kl + sampled_reverse_kl_per_token(logprobs, teacher).sum()
            n_kl += len(logprobs)
    rows = [pairs.rows[i] for i in pairs.sampler(batch_size=4, seed=5).step(0)]
    sums = [
        torch.stack(
            [run.logprobs(r["prompt_ids"] + r[s])[len(r["prompt_ids"]) :].sum() for r in rows]
        )
        for s in ("chosen_ids", "rejected_ids")
    ]
    lengths = [
        torch.tensor([float(len(r[s])) for r in rows]) for s in ("chosen_ids", "rejected_ids")
    ]
    options = ReplayOptions(variant=variant, dpo_beta=0.3)
    losses = replay_per_pair(*sums, *lengths, *(side.detach() for side in sums), options)
    weights = torch.tensor([row["weight"] for row in rows], dtype=torch.float64)
    replay = (losses * weights).sum() / weights.sum()
    return surrogate / n_rl_tokens + ALPHA * kl / n_kl + BETA * replay


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_replayed_traces_reach_the_real_loss_with_the_cores_gradient(
    variant, prepared, monkeypatch
):
    run = Run(prepared(dpo_variant=variant), monkeypatch)
    sink, batch, episodes = asyncio.run(one_step(run))
    assert batch is not None
    assert len(batch.samples) == 2 * GROUP + 2 * 4
    assert not sink.pending_batch, "the step's batch holds the whole step"
    replayed, rollouts = (of_agent(episodes, is_replayed=kind) for kind in (True, False))
    assert len({trace.id for trace in (*replayed, *rollouts)}) == 2 * 4 + 2 * GROUP
    assert {trace.id for trace in replayed} <= batch.cohort.sampled_trace_ids

    loss, sequences = run.trained(batch.samples)
    for trace in (*replayed, *rollouts):
        (branch,) = trace.branches
        assert branch.token_ids in sequences
    pairs = TokenizedPairs(run.config.algo.pairs)
    n_rl_tokens = sum(sum(sample.mask) for sample in batch.samples)
    expected = run.gradient(core_loss(run, rollouts, n_rl_tokens, pairs, variant))
    difference = (run.gradient(loss) - expected).norm() / expected.norm()
    assert difference < 1e-6, float(difference)


def test_metrics_keep_pairs_apart_from_rollouts(prepared, monkeypatch):
    run = Run(prepared(), monkeypatch)
    _, batch, _ = asyncio.run(one_step(run))
    by_agent = batch.cohort.metrics.by_agent()
    assert set(by_agent) == {"agent", "replayed_pair"}
    assert by_agent["agent"].stats()["reward"].mean() == pytest.approx(sum(REWARDS) / len(REWARDS))


def test_the_reference_of_the_first_step_is_kept_for_a_resumed_run(prepared, monkeypatch):
    run = Run(prepared(), monkeypatch)
    asyncio.run(run.start())
    first = Path(run.config.algo.reference).read_bytes()
    with torch.no_grad():
        next(run.model.parameters()).mul_(1.5)
    asyncio.run(run.start())
    assert Path(run.config.algo.reference).read_bytes() == first


def test_second_step_brings_the_next_pairs(prepared, monkeypatch):
    run = Run(prepared(), monkeypatch)
    _, _, episodes = asyncio.run(one_step(run))
    pairs = TokenizedPairs(run.config.algo.pairs)
    drawn = [trace.info["pair"] for trace in of_agent(episodes, is_replayed=True)[::2]]
    assert drawn == list(pairs.sampler(batch_size=4, seed=5).step(0))


def test_first_step_without_a_single_hint_says_so(prepared, monkeypatch, caplog):
    run = Run(prepared(), monkeypatch)
    monkeypatch.setitem(globals(), "HINTS", (None,) * GROUP)
    asyncio.run(one_step(run))
    assert "none of its rows has a hint" in caplog.text


def test_server_that_scores_too_few_tokens_is_refused(prepared, monkeypatch):
    run = Run(prepared(), monkeypatch, lose=1)
    with pytest.raises(AlignmentError, match="vLLM with prompt_logprobs"):
        asyncio.run(run.start())


def test_pairs_that_are_gone_are_an_error_before_the_first_rollout(prepared, monkeypatch):
    run = Run(prepared(), monkeypatch)
    Path(run.config.algo.pairs).unlink()
    with pytest.raises(DatasetError, match="no tokenized pairs"):
        asyncio.run(run.start())


def test_another_versions_hooks_are_named_with_the_commit_to_take(monkeypatch):
    monkeypatch.delitem(sys.modules, "prime_rl.orchestrator.algo")
    for name in [name for name in sys.modules if name.startswith("prime_rl.configs.orchestrator")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "trainer.engines.prime_rl.algorithm")
    monkeypatch.delattr(hooks, "iter_trainable_traces")
    with pytest.raises(TrainerConfigError, match=f"other hooks than commit {register.COMMIT}"):
        register.register()


def test_the_real_launcher_starts_from_our_file(prepared, tmp_path):
    """`rl --dry-run`: it reads the file and writes what its programs would read."""
    path = prepared()
    command = [str(Path(sys.executable).with_name("replay-prime-rl")), "@", str(path), "--dry-run"]
    done = subprocess.run(
        [*command, "--run.name", "dry"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = (path.parent / "run").rglob("orchestrator.json")
    written = json.loads(found.read_text())
    assert written["algo"]["type"] == "three_channels"
    assert OrchestratorConfig.model_validate(written).algo.beta_replay == BETA
