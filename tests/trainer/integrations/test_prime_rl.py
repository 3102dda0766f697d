"""PRIME-RL through its recorded interface: the 58 vectors, and three channels as its trainer sees
them."""

import asyncio
import json
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from tests.trainer import vectors
from tests.trainer.published import session_rows
from trainer.__main__ import main
from trainer.data.rendering import Renderer
from trainer.errors import AlignmentError, DatasetError, TrainerConfigError
from trainer.integrations.pairs import TokenizedPairs, write_pairs
from trainer.integrations.prime_rl import loss as adapter
from trainer.integrations.prime_rl import register
from trainer.integrations.prime_rl.algorithm import (
    Pipeline,
    ThreeChannels,
    options_of,
    recorded_trace,
)
from trainer.integrations.prime_rl.contract import (
    DefaultLoss,
    IPOLoss,
    LossInputs,
    TokenStreams,
    ce_loss,
    compute_loss,
    ref_kl_loss,
)
from trainer.losses.channels import ReplayOptions, replay_per_pair
from trainer.losses.sdpo import sampled_reverse_kl_per_token

VECTORS = "prime_rl_0_8"
CASES = vectors.cases(VECTORS)["cases"]
COMPONENTS = [key for key in CASES if not key.startswith("compute_loss")]
STREAMS = (
    "inference_logprobs",
    "advantages",
    "loss_mask",
    "ref_logprobs",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
)


def tensor(key: str, name: str) -> torch.Tensor | None:
    name = f"{key}/{name}"
    return vectors.tensor(VECTORS, name) if name in vectors.names(VECTORS) else None


def loss_of(key: str):
    config = dict(CASES[key]["config"])
    kind = config.pop("type", key.split("/")[0])
    return {
        "default": lambda: DefaultLoss(**config),
        "ipo": lambda: IPOLoss(**config),
        "ref_kl": lambda: ref_kl_loss,
        "ce": lambda: ce_loss,
    }[kind]()


def inputs_of(key: str) -> LossInputs:
    names = ("inference_logprobs", "advantages", "loss_mask", "ref_logprobs", "loss_weights")
    trained = tensor(key, "trainer_logprobs")
    assert trained is not None
    return LossInputs(
        trainer_logprobs=trained.requires_grad_(), **{name: tensor(key, name) for name in names}
    )


def test_there_are_58_vectors():
    assert len(CASES) == 58


@pytest.mark.parametrize("key", COMPONENTS)
def test_contract_has_the_recorded_loss_gradient_and_metrics(key):
    inputs = inputs_of(key)
    outputs = loss_of(key)(inputs)
    torch.testing.assert_close(outputs.loss.detach(), tensor(key, "loss"), atol=1e-11, rtol=1e-11)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    torch.testing.assert_close(gradient, tensor(key, "grad"), atol=1e-11, rtol=1e-11)
    recorded = {name.split("metric.")[1] for name in CASES[key]["fields"] if "metric." in name}
    assert recorded == set(outputs.metrics)
    for name in recorded:
        expected = float(tensor(key, f"metric.{name}"))
        assert float(outputs.metrics[name]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("key", [key for key in COMPONENTS if key.startswith("default")])
def test_policy_loss_is_the_default_loss(key):
    config = {k: v for k, v in CASES[key]["config"].items() if k != "type"}
    inputs = inputs_of(key)
    outputs = adapter.policy_loss(inputs, **config)
    assert torch.equal(outputs.loss, DefaultLoss(**config)(inputs).loss)
    torch.testing.assert_close(outputs.loss.detach(), tensor(key, "loss"), atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("key", [key for key in CASES if key.startswith("compute_loss")])
def test_overlapping_components_add_up_as_recorded(key):
    lengths = tensor(key, "lengths").tolist()
    trained = tensor(key, "trainer_logprobs").requires_grad_()
    columns = {
        name: [None] * len(lengths)
        if tensor(key, name) is None
        else tensor(key, name).split(lengths)
        for name in STREAMS
    }
    sequences = [
        TokenStreams(**{name: columns[name][i] for name in STREAMS}) for i in range(len(lengths))
    ]
    loss = compute_loss(list(trained.split(lengths)), sequences, DefaultLoss())
    torch.testing.assert_close(loss.detach(), tensor(key, "loss"), atol=1e-10, rtol=1e-10)
    (gradient,) = torch.autograd.grad(loss, trained)
    torch.testing.assert_close(gradient, tensor(key, "grad"), atol=1e-10, rtol=1e-10)


def test_inputs_of_an_unknown_version_are_refused_with_what_they_have():
    with pytest.raises(TrainerConfigError, match="has no trainer_logprobs but logits"):
        adapter.policy_loss(SimpleNamespace(logits=1))


def test_doctor_compares_the_installed_loss_with_the_contract(monkeypatch):
    register.doctor()
    monkeypatch.setattr(register, "default_loss", lambda: DefaultLoss(adv_tau=0.5))
    with pytest.raises(TrainerConfigError, match="differs from that of 0"):
        register.doctor()


def test_without_prime_rl_its_orchestrator_says_how_to_get_it(capsys):
    assert register.main() == 2
    assert "PRIME-RL is not installed" in capsys.readouterr().err


def test_algorithm_is_a_member_of_the_configurations_union():
    class GRPO(BaseModel):
        model_config = ConfigDict(extra="forbid")
        type: str = "grpo"
        length_penalty: float | None = None

    config: Any = TypeAdapter(register.config_class(GRPO)).validate_python(
        {"type": "three_channels", "alpha_sdpo": 0.1, "length_penalty": 0.5, "dpo_variant": "dpo"}
    )
    options = options_of(config)
    assert (options.alpha_sdpo, options.replay.variant) == (0.1, "dpo")
    with pytest.raises(ValueError, match="extra"):
        TypeAdapter(register.config_class(GRPO)).validate_python({"alpha": 1.0})


# -- the algorithm through the recorded interface --------------------------------------------------


@dataclass
class Node:
    """A node of a message graph, as far as algorithms write to it."""

    token_ids: list[int]
    mask: list[bool]
    sampled: bool = False
    parent: int | None = None
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] | None = None
    reference_logprobs: list[float] | None = None
    loss_weights: dict[str, list[float]] | None = None

    def model_copy(self, *, update: dict[str, Any]) -> "Node":
        return replace(self, **update)


@dataclass
class Trace:
    nodes: list[Node]
    task: Any
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)

    def model_copy(self, *, update: dict[str, Any]) -> "Trace":
        return replace(self, **update)

    @property
    def token_ids(self) -> list[int]:
        return [i for node in self.nodes for i in node.token_ids]


class GRPO:
    """The advantage that PRIME-RL's GRPO assigns by default: reward minus the group's mean."""

    def __init__(self, config, clients):
        self.config, self.clients = config, clients

    async def setup(self):
        pass

    async def score_episode(self, episode):
        pass

    async def score_group(self, episodes):
        traces = [trace for episode in episodes for trace in episode.traces]
        mean = sum(trace.reward for trace in traces) / len(traces)
        for trace in traces:
            for node in trace.nodes:
                if node.sampled:
                    node.advantages = [trace.reward - mean] * len(node.token_ids)


def assign_reference(trace: Trace, logprobs: list[float]) -> None:
    offset = 0
    for node in trace.nodes:
        node.reference_logprobs = logprobs[offset : offset + len(node.token_ids)]
        offset += len(node.token_ids)
    assert offset == len(logprobs)


HINT_IDS = [7, 3, 9]


class Algorithm(ThreeChannels, GRPO):
    pipeline = Pipeline(
        trainable_traces=lambda episodes: [t for e in episodes for t in e.traces],
        branches=lambda trace: [SimpleNamespace(token_ids=trace.token_ids, nodes=trace.nodes)],
        assign_reference=lambda branch, logprobs: assign_reference(branch, logprobs),
        hint_ids=lambda algorithm, text: HINT_IDS if text else [],
    )


class Policy(torch.nn.Module):
    """A tiny language model in float64: enough to tell every context apart."""

    def __init__(self, vocabulary: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shape = (vocabulary, 16)
        self.embedding = torch.nn.Parameter(
            torch.randn(shape, generator=generator, dtype=torch.float64)
        )
        self.head = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of every token given all before it; 0 for the first."""
        states = self.embedding[torch.tensor(ids)].cumsum(0)
        decay = torch.arange(1, len(ids) + 1, dtype=torch.float64)[:, None]
        logp = ((states / decay) @ self.head.T).log_softmax(-1)
        picked = logp[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        return torch.cat([picked.new_zeros(1), picked])

    async def score(self, ids: list[int]) -> list[float]:
        with torch.no_grad():
            return self.logprobs(ids).tolist()


def rollout(policy: Policy, seed: int, reward: float, hint: str | None) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 500, (9 + seed % 3,), generator=generator).tolist()
    with torch.no_grad():
        logprobs = policy.logprobs(ids)[4:].tolist()
    nodes = [
        Node(ids[:4], [False] * 4),
        Node(ids[4:], [True] * (len(ids) - 4), sampled=True, parent=0, logprobs=logprobs),
    ]
    return Trace(nodes, SimpleNamespace(data=SimpleNamespace(hint=hint)), reward)


@pytest.fixture
def pairs_file(tmp_path, tokenizer):
    renderer = Renderer(tokenizer=tokenizer, max_prompt_tokens=32, max_response_tokens=16)
    rows = [row | {"weight": 1.0 + i} for i, row in enumerate(session_rows(0))]
    write_pairs(tmp_path / "pairs.parquet", rows, renderer)
    return tmp_path / "pairs.parquet"


def config_for(pairs_file: Path, **change: Any) -> SimpleNamespace:
    values = {
        "alpha_sdpo": 0.2,
        "beta_replay": 0.7,
        "policy_weight": 0.5,
        "dpo_variant": "dpo",
        "dpo_beta": 0.3,
        "pairs": str(pairs_file),
        "pairs_per_step": 3,
        "groups_per_step": 1,
        "reference": str(pairs_file.with_name("reference.json")),
        "seed": 5,
    }
    return SimpleNamespace(**(values | change))


def finished(algorithm: Any, episodes: list[Any]) -> list[Trace]:
    async def run() -> None:
        await algorithm.setup()
        for episode in episodes:
            await algorithm.score_episode(episode)
        await algorithm.score_group(episodes)

    asyncio.run(run())
    return [trace for episode in episodes for trace in episode.traces]


def streams(trace: Trace) -> TokenStreams:
    """What the orchestrator ships of a trace: its nodes' columns, end to end."""

    def column(name: str, empty: float) -> torch.Tensor:
        values: list[float] = []
        for node in trace.nodes:
            own = getattr(node, name) or []
            values += own if len(own) == len(node.token_ids) else [empty] * len(node.token_ids)
        return torch.tensor(values, dtype=torch.float64)

    weights = [
        weight
        for node in trace.nodes
        for weight in (node.loss_weights or {}).get("ref_kl", [0.0] * len(node.token_ids))
    ]
    return TokenStreams(
        inference_logprobs=column("logprobs", 0.0),
        advantages=column("advantages", 0.0),
        loss_mask=torch.tensor([kept for node in trace.nodes for kept in node.mask]),
        ref_logprobs=column("reference_logprobs", 0.0),
        ref_kl_weights=torch.tensor(weights, dtype=torch.float64),
    )


def core_loss(policy, initial, rollouts, hinted, pairs, drawn, config, n_rl_tokens):
    """The three channels written with the loss core."""
    mean = sum(trace.reward for trace in rollouts) / len(rollouts)
    surrogate, kl, n_kl = torch.zeros(()), torch.zeros(()), 0
    for trace in rollouts:
        logprobs = policy.logprobs(trace.token_ids)[4:]
        ratio = (logprobs - logprobs.detach()).exp()
        surrogate = surrogate - config.policy_weight * ((trace.reward - mean) * ratio).sum()
        if trace in hinted:
            with torch.no_grad():
                teacher = initial.logprobs(HINT_IDS + trace.token_ids)[len(HINT_IDS) + 4 :]
            kl = kl + sampled_reverse_kl_per_token(logprobs, teacher).sum()
            n_kl += len(logprobs)

    def sums(model):
        rows = [pairs.rows[i] for i in drawn]
        return [
            [
                model.logprobs(row["prompt_ids"] + row[side])[len(row["prompt_ids"]) :].sum()
                for side in ("chosen_ids", "rejected_ids")
            ]
            for row in rows
        ]

    scored = torch.stack([torch.stack(row) for row in sums(policy)])
    with torch.no_grad():
        reference = torch.stack([torch.stack(row) for row in sums(initial)])
    lengths = torch.tensor(
        [[len(pairs.rows[i][side]) for side in ("chosen_ids", "rejected_ids")] for i in drawn]
    ).double()
    options = ReplayOptions(
        variant=config.dpo_variant, dpo_beta=config.dpo_beta, simpo_beta=2.0, simpo_gamma=1.0
    )
    losses = replay_per_pair(
        *scored.unbind(-1), *lengths.unbind(-1), *reference.unbind(-1), options
    )
    weights = torch.tensor([pairs.rows[i]["weight"] for i in drawn], dtype=torch.float64)
    replay = (losses * weights).sum() / weights.sum()
    return surrogate / n_rl_tokens + config.alpha_sdpo * kl / n_kl + config.beta_replay * replay


@pytest.mark.parametrize("variant", ["dpo", "dpo_norm", "simpo"])
def test_three_channels_have_the_cores_gradient_in_prime_rls_trainer(variant, pairs_file):
    """Three rollouts, two of them hinted, and three pairs, shipped as token streams.

    Channel 1 is PRIME-RL's own, over its own count of tokens; 2 and 3 are the core's means.
    """
    policy = Policy(512, seed=0)
    rollouts = [
        rollout(policy, 1, 1.0, "Error: file has not been read yet"),
        rollout(policy, 2, 0.0, None),
        rollout(policy, 3, 0.0, "Error: file has not been read yet"),
    ]
    hinted = [rollouts[0], rollouts[2]]
    config = config_for(pairs_file, dpo_variant=variant)
    algorithm = Algorithm(config, policy)
    shipped = finished(algorithm, [SimpleNamespace(traces=[trace]) for trace in rollouts])
    assert len(shipped) == 3 + 2 * 3
    sequences = [streams(trace) for trace in shipped]
    trained = [policy.logprobs(trace.token_ids) for trace in shipped]
    default = adapter.default_loss(kl_tau=0.0)
    parameters = list(policy.parameters())
    seen = torch.autograd.grad(compute_loss(trained, sequences, default), parameters)

    pairs = TokenizedPairs(pairs_file)
    drawn = pairs.sampler(batch_size=3, seed=5).step(0)
    n_rl_tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    loss = core_loss(policy, policy, rollouts, hinted, pairs, drawn, config, n_rl_tokens)
    expected = torch.autograd.grad(loss, parameters)
    difference = sum(float((a - b).pow(2).sum()) for a, b in zip(seen, expected, strict=True))
    norm = sum(float(b.pow(2).sum()) for b in expected)
    assert (difference / norm) ** 0.5 < 1e-6


def test_recorded_trace_keeps_no_note_about_the_tokens_of_its_template():
    class Message(BaseModel):
        """A node as verifiers has it: notes per token that have to fit the tokens."""

        parent: int | None = None
        token_ids: list[int]
        mask: list[bool]
        sampled: bool = False
        logprobs: list[float] = []
        advantages: list[float] | None = None
        reference_logprobs: list[float] | None = None
        loss_weights: dict[str, list[float]] | None = None
        is_content: list[bool] = []
        entropies: list[float] | None = None

    nodes = [
        Message(token_ids=[1, 2], mask=[False] * 2, is_content=[True] * 2),
        Message(
            parent=0,
            sampled=True,
            token_ids=[3, 4, 5],
            mask=[True] * 3,
            logprobs=[-1.0] * 3,
            entropies=[0.5] * 3,
            loss_weights={"ref_kl": [0.1] * 3},
        ),
    ]
    template = Trace(nodes, None)  # type: ignore[arg-type]
    recorded = recorded_trace(template, [9], [8, 7], [-0.1, -0.2], 0.25)
    prompt, response = recorded.nodes
    assert (prompt.token_ids, prompt.mask, prompt.is_content) == ([9], [False], [])
    assert (response.token_ids, response.parent, response.mask) == ([8, 7], 0, [True] * 2)
    assert (response.logprobs, response.advantages) == ([-0.1, -0.2], [0.25, 0.25])
    assert response.entropies is None
    assert response.loss_weights is None
    assert template.nodes[1].token_ids == [3, 4, 5]
    assert recorded.info == {"replayed_pair": True}


def test_pairs_of_a_step_are_spread_over_its_groups(pairs_file):
    policy = Policy(512, seed=0)
    algorithm = Algorithm(config_for(pairs_file, groups_per_step=2, dpo_variant="simpo"), policy)
    pairs, carried = TokenizedPairs(pairs_file), []
    for _group in range(4):
        traces = finished(
            algorithm,
            [SimpleNamespace(traces=[rollout(policy, s, float(s), None)]) for s in (1, 2)],
        )
        carried.append([t.nodes[1].token_ids for t in traces if t.info.get("replayed_pair")])
    sampler = pairs.sampler(batch_size=3, seed=5)
    for step in (0, 1):
        seen = carried[2 * step] + carried[2 * step + 1]
        expected = [
            pairs.rows[i][side]
            for i in sampler.step(step)
            for side in ("chosen_ids", "rejected_ids")
        ]
        assert seen == expected


def test_reference_of_a_resumed_run_is_that_of_its_start(pairs_file):
    config = config_for(pairs_file)
    episodes = [SimpleNamespace(traces=[rollout(Policy(512, 0), 1, 1.0, None)])]
    finished(Algorithm(config, Policy(512, 0)), episodes)
    kept = json.loads(Path(config.reference).read_text())["logps"]
    moved = Algorithm(config, Policy(512, 9))
    asyncio.run(moved.setup())
    assert moved._reference == kept


def test_task_without_a_hint_field_is_an_error_and_not_a_silent_channel(pairs_file):
    policy = Policy(512, seed=0)
    trace = rollout(policy, 1, 1.0, None)
    trace.task = SimpleNamespace(data=SimpleNamespace())
    algorithm = Algorithm(config_for(pairs_file), policy)
    with pytest.raises(DatasetError, match="the task's data has no `hint`"):
        asyncio.run(algorithm.score_episode(SimpleNamespace(traces=[trace])))


def test_first_step_without_a_single_hint_says_so(pairs_file, caplog):
    policy = Policy(512, seed=0)
    algorithm = Algorithm(config_for(pairs_file), policy)
    finished(algorithm, [SimpleNamespace(traces=[rollout(policy, 1, 1.0, None)])])
    assert "none of its rows has a hint" in caplog.text


def test_no_pairs_is_an_error_when_the_algorithm_is_built(tmp_path):
    with pytest.raises(DatasetError, match="no tokenized pairs"):
        Algorithm(config_for(tmp_path / "none.parquet"), Policy(512, seed=0))


def test_server_that_scores_too_few_tokens_is_refused(pairs_file):
    class Short(Policy):
        async def score(self, ids):
            return (await super().score(ids))[1:]

    with pytest.raises(AlignmentError, match="vLLM with prompt_logprobs"):
        asyncio.run(Algorithm(config_for(pairs_file), Short(512, 0)).setup())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha_sdpo": 0, "beta_replay": 0, "policy_weight": 0}, "all three channels"),
        ({"alpha_sdpo": -1}, "negative weight"),
        ({"groups_per_step": 0}, "at least 1"),
        ({"dpo_variant": "ipo"}, "dpo_variant"),
    ],
)
def test_options_that_mean_nothing_are_refused(change, message, tmp_path):
    with pytest.raises(TrainerConfigError, match=message):
        options_of(config_for(tmp_path / "none", **change))


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def settings_file(folder: Path, dataset: Path, model: Path, **trl: Any) -> Path:
    shared = {
        "objective": "grpo",
        "alpha_sdpo": 0.1,
        "sdpo_estimator": "sampled",
        "jsd_beta": 1.0,
        "beta_replay": 0.05,
        "dpo_variant": "dpo",
        "max_steps": 7,
        "num_generations": 4,
    }
    values = {
        "dataset": str(dataset),
        "output": str(folder / "out"),
        "model": str(model),
        "rollouts": "generate",
        "trl": shared | trl,
        "engines": {"prime_rl": {"orchestrator.max_off_policy_steps": 0}},
    }
    path = folder / "settings.yaml"
    path.write_text(json.dumps(values))
    return path


def test_settings_file_becomes_toml_and_pairs(dataset_folder, saved, tmp_path, capsys):
    path = settings_file(tmp_path, dataset_folder, saved)
    assert main(["prime_rl", "--config", str(path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["states"], report["hints"], report["pairs"]) == (20, 10, 20)
    config = tomllib.loads(Path(report["config"]).read_text())
    assert config["max_steps"] == 7
    assert config["orchestrator"]["max_off_policy_steps"] == 0
    assert config["orchestrator"]["algo"]["groups_per_step"] == 2
    assert config["orchestrator"]["train"]["env"][0]["taskset"]["dataset"] == str(dataset_folder)
    assert config["trainer"]["loss"]["import_path"].endswith(".loss.policy_loss")
    options = options_of(SimpleNamespace(**config["orchestrator"]["algo"]))
    assert len(TokenizedPairs(options.pairs)) == 20


@pytest.mark.parametrize(
    ("trl", "message"),
    [
        ({"sdpo_estimator": "teacher_topk"}, "set trl.sdpo_estimator=sampled"),
        ({"num_generations": 3}, "no whole groups"),
        ({"max_steps": -1}, "set trl.max_steps"),
    ],
)
def test_what_prime_rl_cannot_do_is_refused(trl, message, dataset_folder, saved, tmp_path, capsys):
    path = settings_file(tmp_path, dataset_folder, saved, **trl)
    assert main(["prime_rl", "--config", str(path)]) == 2
    assert message in capsys.readouterr().err
