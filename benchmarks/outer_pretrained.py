"""The outer loop on pretrained weights: codecs and AdamW on all three channels, by LoRA.

    python benchmarks/outer_pretrained.py           # every arm, three seeds; half an hour
    python benchmarks/outer_pretrained.py --table   # what is measured so far, as the docs have it
    python benchmarks/outer_pretrained.py --small --arms every_step unequal ternary    # five seeds, a fifth

Needs SmolLM2-135M (`make real-model`) and the demo's dataset (`make demo`). Four replicas fine-tune
LoRA on the last six layers, on the demo's pairs cut to their last 96 tokens; one replica's codec is
all that differs between arms, and `adamw` makes the same steps on the mean gradient of all four.
`every_step` is `ternary` in rounds of one step, and `unequal` the same asynchronously, at equal
tokens, one replica five times slower: the others make its steps, by a clock on which a replica's step
takes one or five; nobody sleeps. `--small` has adapters on the last two layers alone, and a head of fewer tokens.
An arm that is in the JSON already is not run again. Everything below the adapters is frozen, so
its activations are computed once; so are those of the teacher, which is the model without adapter.

The objective is that of a run: `policy_weight` times the clipped surrogate of both recorded
actions of a state (advantages +1 and -1, against the log-probs when the run began), `alpha_sdpo`
times the divergence from the teacher, who is told the consensus, and `beta_replay` times SimPO.
"""

import argparse
import hashlib
import heapq
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.data.types import PairRow
from trainer.diloco import MemoryStore, OuterReplica, OuterSettings, outer_preset
from trainer.diloco.codecs import CODECS
from trainer.diloco.exchange import RoundReport
from trainer.diloco.parameters import ParameterVector
from trainer.losses.channels import distillation_per_token, replay_per_pair
from trainer.model.loading import with_adapter
from trainer.model.tree_layout import PackedTree, pack_pairs
from trainer.settings import PeftOptions, SharedSettings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FROZEN = ROOT / "build" / "outer_pretrained.pt"
ARMS = ("adamw", *CODECS, "every_step", "unequal")
SLOWNESS = 5.0
N_REPLICAS, N_ROUNDS, INNER_STEPS = 4, 12, 3
SHORT_ROUND = 1
"""Steps of a round of `every_step` and `unequal`."""
LEARNING_RATE = 1e-3
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
PEFT = PeftOptions(
    rank=8, alpha=16, layers="last 6", targets=["q_proj", "k_proj", "v_proj", "o_proj"]
)
SHARED = SharedSettings(policy_weight=0.1, alpha_sdpo=0.1, beta_replay=1.0)
BUDGET = {"max_prompt_tokens": 96, "max_response_tokens": 64}


@dataclass(frozen=True, eq=False)
class Example:
    """A pair as a prefix tree, with what the frozen part of the model makes of it."""

    tree: PackedTree
    lower_N_H: Tensor
    """Activations below the adapters."""
    teacher_C_H: Tensor
    """The teacher's last states at the tokens of the chosen side."""
    old_logps_S: Tensor
    """Log-probs of both sides' tokens when the run begins."""


class Policy:
    """A causal LM with adapters on its last layers."""

    def __init__(self, folder: str, rows: Sequence[PairRow]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.renderer = Renderer(tokenizer=self.tokenizer, with_tools=False, **BUDGET)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        torch.manual_seed(0)
        self.model = with_adapter(base, PEFT)
        self.body, self.head = base.model, base.lm_head
        self.n_frozen = len(self.body.layers) - int(str(PEFT.layers).rpartition(" ")[2])
        self.view = ParameterVector(self.model)
        self.examples: list[Example] = []
        known = torch.load(FROZEN) if FROZEN.exists() else {}
        for row in rows:
            tree, told = self._trees(row)
            key = hashlib.sha256(
                repr((tree.input_ids_N.tolist(), told.input_ids_N.tolist())).encode()
            ).hexdigest()
            if key not in known:
                known[key] = self._frozen(tree, told)
                print(f"frozen part of {len(known)} of {len(rows)} pairs", end="\r", flush=True)
            self.examples.append(Example(tree, *known[key]))
        FROZEN.parent.mkdir(exist_ok=True)
        torch.save(known, FROZEN)

    @torch.no_grad()
    def shrink(self, folder: str, *, n_layers: int = 2, n_others: int = 1500) -> None:
        """Adapt fewer layers, and leave the head the tokens that occur and some others."""
        n_all = len(self.body.layers)
        lower = [
            self._through(one.tree, one.lower_N_H, self.n_frozen, n_all - n_layers)
            for one in self.examples
        ]
        rows_V_H = self.head.weight
        seen = {int(token) for one in self.examples for token in one.tree.input_ids_N}
        kept = sorted(seen | set(random.Random(0).sample(range(len(rows_V_H)), n_others)))
        self.head = torch.nn.Linear(rows_V_H.shape[1], len(kept), bias=False).requires_grad_(False)
        self.head.weight.copy_(rows_V_H[kept])
        place_V = torch.zeros(len(rows_V_H), dtype=torch.long)
        place_V[kept] = torch.arange(len(kept))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model = with_adapter(base, replace(PEFT, layers=f"last {n_layers}"))
        self.body, self.n_frozen = base.model, n_all - n_layers
        self.view = ParameterVector(self.model)
        for i, (one, lower_N_H) in enumerate(zip(self.examples, lower, strict=True)):
            tree = replace(one.tree, target_ids_E=place_V[one.tree.target_ids_E])
            logits_EV = self._logits(tree, self._through(tree, lower_N_H, self.n_frozen))
            logps_S = _picked(tree, logits_EV.log_softmax(-1))
            self.examples[i] = Example(tree, lower_N_H, one.teacher_C_H, logps_S)

    def start(self, seed: int) -> None:
        """Draw fresh adapters; the model is the pretrained one again."""
        torch.manual_seed(seed)
        for module in self.model.modules():
            if hasattr(module, "reset_lora_parameters"):
                module.reset_lora_parameters("default", init_lora_weights=True)

    def _trees(self, row: PairRow) -> tuple[PackedTree, PackedTree]:
        """Pack a pair, and its chosen side behind what the teacher is told."""
        chosen, rejected = (
            self.renderer.response_ids(row[side]) for side in ("chosen", "rejected")
        )
        hint = "Others who were asked this agreed on: " + self.tokenizer.decode(chosen[:-1])
        prompt, hinted = (self.renderer.prompt_ids(row["prompt"], hint=h) for h in (None, hint))
        return pack_pairs([(prompt, chosen, rejected)]), pack_pairs([(hinted, chosen, chosen)])

    @torch.no_grad()
    def _frozen(self, tree: PackedTree, told: PackedTree) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what training never changes, in the order of `Example`."""
        lower = self._through(tree, self.body.embed_tokens(tree.input_ids_N), 0, self.n_frozen)
        teacher = self._through(told, self.body.embed_tokens(told.input_ids_N), 0, self.n_frozen)
        teacher = self._through(told, teacher, self.n_frozen)
        logp_EV = self._logits(tree, self._through(tree, lower, self.n_frozen)).log_softmax(-1)
        edges = told.edges_S[told.sequences_S == 0]
        return lower, teacher[told.predictors_E[edges]], _picked(tree, logp_EV)

    def _through(
        self, tree: PackedTree, hidden_N_H: Tensor, first: int, last: int | None = None
    ) -> Tensor:
        """Run some layers; the norm comes behind the last of all."""
        positions = tree.position_ids_N[None]
        rotary = self.body.rotary_emb(hidden_N_H[None], positions)
        hidden, mask = hidden_N_H[None], tree.visible()[None, None]
        for layer in self.body.layers[first:last]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        return (self.body.norm(hidden) if last is None else hidden)[0]

    def _logits(self, tree: PackedTree, hidden_N_H: Tensor) -> Tensor:
        return self.head(hidden_N_H[tree.predictors_E])

    def loss(self, example: Example) -> tuple[Tensor, dict[str, float]]:
        """Compute the objective on one pair, and its three parts with the pair's accuracy."""
        tree = example.tree
        logits_EV = self._logits(tree, self._through(tree, example.lower_N_H, self.n_frozen))
        logps_S = _picked(tree, logits_EV.log_softmax(-1))
        is_chosen_S = tree.sequences_S == 0
        advantage_S = torch.where(is_chosen_S, 1.0, -1.0)
        ratio_S = (logps_S - example.old_logps_S).exp()
        clipped_S = ratio_S.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        policy = -torch.min(ratio_S * advantage_S, clipped_S * advantage_S).mean()
        with torch.no_grad():
            teacher_CV = self.head(example.teacher_C_H)
        edges_C = tree.edges_S[is_chosen_S]
        sdpo = distillation_per_token(
            logits_EV[edges_C], teacher_CV, tree.target_ids_E[edges_C], SHARED.sdpo
        ).mean()
        chosen, rejected = logps_S[is_chosen_S].sum(), logps_S[~is_chosen_S].sum()
        n_chosen, n_rejected = tree.chosen_lengths, tree.rejected_lengths
        replay = replay_per_pair(
            chosen[None], rejected[None], n_chosen, n_rejected, None, None, SHARED.replay
        ).mean()
        total = SHARED.policy_weight * policy + SHARED.alpha_sdpo * sdpo
        total = total + SHARED.beta_replay * replay
        is_right = float(chosen / n_chosen[0] > rejected / n_rejected[0])
        parts = {"policy": policy, "sdpo": sdpo, "replay": replay, "total": total}
        return total, {name: float(part.detach()) for name, part in parts.items()} | {
            "accuracy": is_right
        }

    @torch.no_grad()
    def measure(self, examples: Sequence[Example]) -> dict[str, float]:
        """Return the means of the objective and its parts."""
        rows = [self.loss(example)[1] for example in examples]
        return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}

    def step(self, optimizer: torch.optim.Optimizer, examples: Sequence[Example]) -> None:
        """Make one step on the mean of some pairs."""
        optimizer.zero_grad()
        for example in examples:
            (self.loss(example)[0] / len(examples)).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, SHARED.max_grad_norm)
        optimizer.step()

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained, lr=LEARNING_RATE, weight_decay=0.0)


def _picked(tree: PackedTree, logp_EV: Tensor) -> Tensor:
    """Return the log-prob of every completion token, one side after the other."""
    return logp_EV.gather(1, tree.target_ids_E[:, None])[:, 0][tree.edges_S]


def batches(n_pairs: int, seed: int) -> list[list[list[int]]]:
    """Draw what every replica sees: pairs by rank and step, each shard anew when it is used up.

    Twice what a replica needs: among unequal ones the quick make the rounds of the slow.
    """
    found = []
    for rank in range(N_REPLICAS):
        draw, order = random.Random(1000 * seed + rank), []
        while len(order) < 2 * N_ROUNDS * INNER_STEPS:
            shard = list(range(rank, n_pairs, N_REPLICAS))
            order += draw.sample(shard, len(shard))
        found.append([[pair] for pair in order])
    return found


def inner_steps(
    policy: Policy, theta: Any, optimizer: torch.optim.Optimizer, shown: list[list[int]]
) -> Any:
    """Make the inner steps of a replica's round; return where it ends."""
    policy.view.write(theta)
    for batch in shown:
        policy.step(optimizer, [policy.examples[i] for i in batch])
    return policy.view.read()


def train_parallel(policy: Policy, shown: list[list[list[int]]]) -> None:
    """Train with one optimizer on what all replicas see at a step."""
    optimizer = policy.optimizer()
    for at_once in list(zip(*shown, strict=False))[: N_ROUNDS * INNER_STEPS]:
        policy.step(optimizer, [policy.examples[i] for batch in at_once for i in batch])


def train_replicas(
    policy: Policy, shown: list[list[list[int]]], codec: str, n_steps: int = INNER_STEPS
) -> list[RoundReport]:
    """Train replicas in turn on one model; rounds of `n_steps` run over a store, all at a time."""
    n_rounds = N_ROUNDS * INNER_STEPS // n_steps
    store, start = MemoryStore(), policy.view.read()
    settings = OuterSettings(
        codec=codec, outer=outer_preset("average"), n_rounds=n_rounds, quorum=N_REPLICAS,
        snapshot_every=10**6,
    )  # fmt: skip
    ranks = range(N_REPLICAS)
    replicas = [
        OuterReplica(store, start, rank=rank, world_size=N_REPLICAS, settings=settings)
        for rank in ranks
    ]
    optimizers = [policy.optimizer() for _ in ranks]
    reports: list[RoundReport] = []
    with ThreadPoolExecutor(N_REPLICAS) as pool:
        list(pool.map(OuterReplica.join, replicas))
        for first in range(0, n_rounds * n_steps, n_steps):
            local = [
                inner_steps(policy, replica.theta, optimizer, batch[first : first + n_steps])
                for replica, optimizer, batch in zip(replicas, optimizers, shown, strict=True)
            ]
            reports += pool.map(OuterReplica.exchange, replicas, local)
    assert len({replica.base for replica in replicas}) == 1
    policy.view.write(replicas[0].theta)
    return reports


def train_unequal(policy: Policy, shown: list[list[list[int]]], codec: str) -> list[RoundReport]:
    """Train asynchronously as many steps as `train_replicas` does, by a clock of its own."""
    store, start = MemoryStore(), policy.view.read()
    settings = OuterSettings(
        rounds="asynchronous", codec=codec, outer=outer_preset("average"), snapshot_every=10**6
    )
    replicas = [
        OuterReplica(store, start, rank=rank, world_size=N_REPLICAS, settings=settings)
        for rank in range(N_REPLICAS)
    ]
    for replica in replicas:
        replica.join()
    optimizers = [policy.optimizer() for _ in replicas]
    steps = [iter(batches) for batches in shown]
    n_made, local = [0] * N_REPLICAS, [start] * N_REPLICAS
    reports: list[RoundReport] = []
    pace = [SLOWNESS if replica.rank == 0 else 1.0 for replica in replicas]
    clock = [(pace[replica.rank], replica.rank) for replica in replicas]
    for _ in range(N_ROUNDS * INNER_STEPS * N_REPLICAS):
        now, rank = heapq.heappop(clock)
        replica = replicas[rank]
        policy.view.write(local[rank])
        policy.step(optimizers[rank], [policy.examples[i] for i in next(steps[rank])])
        moved = replica.take_up()
        local[rank] = policy.view.read() + (0 if moved is None else moved)
        n_made[rank] += 1
        if n_made[rank] % SHORT_ROUND == 0:
            reports.append(replica.exchange(local[rank]))
            local[rank] = replica.theta.copy()
        heapq.heappush(clock, (now + pace[rank], rank))
    assert not any(n % SHORT_ROUND for n in n_made), "all that was trained is in the log"
    policy.view.write(max(replicas, key=lambda replica: replica.round_id).theta)
    return reports


def run(policy: Policy, n_train: int, arm: str, seed: int) -> dict[str, Any]:
    """Train one arm and measure it on held-out pairs."""
    began = time.process_time()
    policy.start(seed)
    shown = batches(n_train, seed)
    row: dict[str, Any] = {"arm": arm, "seed": seed}
    if arm == "adamw":
        train_parallel(policy, shown)
    else:
        codec = arm if arm in CODECS else "ternary"
        if arm == "unequal":
            reports = train_unequal(policy, shown, codec)
        else:
            n_steps = SHORT_ROUND if arm == "every_step" else INNER_STEPS
            reports = train_replicas(policy, shown, codec, n_steps)
        # Of a synchronous round, or of as many steps.
        n_sent = sum(report.up_bytes for report in reports)
        row["up_bytes"] = round(n_sent / N_REPLICAS / N_ROUNDS)
    held_out = policy.measure(policy.examples[n_train:])
    return row | {"held_out": held_out, "cpu_s": round(time.process_time() - began, 1)}


def table(found: dict[str, Any]) -> str:
    """Write what was measured for people: means over seeds, gains against the float32 arm's."""
    before = found["before"]

    @cache
    def of(arm: str) -> dict[int, dict[str, Any]]:
        return {row["seed"]: row for row in found["rows"] if row["arm"] == arm}

    def gain(arm: str, seed: int) -> float:
        return before["total"] - of(arm)[seed]["held_out"]["total"]

    lines = [
        f"Before: {json.dumps({name: round(value, 4) for name, value in before.items()})}",
        "| arm | seeds | bytes up | fewer | gain | gain kept | held-out loss | accuracy |",
        "|" + "---|" * 8,
    ]
    for arm in filter(of, ARMS):
        rows = list(of(arm).values())
        kept = [100 * gain(arm, s) / gain("fp32", s) for s in of(arm) if s in of("fp32")]
        losses = [row["held_out"]["total"] for row in rows]
        up = [row["up_bytes"] for row in rows if "up_bytes" in row]
        full = [row["up_bytes"] for row in of("fp32").values()]
        fewer = statistics.fmean(full) / statistics.fmean(up) if up and full else 0.0
        cells = [
            arm,
            str(len(rows)),
            f"{statistics.fmean(up):,.0f}" if up else "gradients at every step",
            f"{fewer:.1f} ×" if fewer else "",
            f"{statistics.fmean(gain(arm, s) for s in of(arm)):.4f}",
            ", ".join(f"{one:.1f} %" for one in kept),
            ", ".join(f"{loss:.4f}" for loss in losses),
            ", ".join(f"{row['held_out']['accuracy']:.0%}" for row in rows),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for arm, other in (("fp32", "adamw"), ("unequal", "every_step"), ("unequal", "ternary")):
        above = [
            f"{of(arm)[s]['held_out']['total'] / of(other)[s]['held_out']['total'] - 1:+.2%}"
            for s in of(arm)
            if s in of(other)
        ]
        lines.append(f"Held-out loss of {arm} above that of {other}: {', '.join(above)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "build/real-model/smollm2-135m-instruct"))
    parser.add_argument("--dataset", default=str(ROOT / "demo/dataset"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--small", action="store_true", help="two adapted layers, five seeds")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--table", action="store_true", help="only show what is there")
    options = parser.parse_args()
    name = "outer_unequal.json" if options.small else "outer_pretrained.json"
    results: Path = options.results or RESULTS / name
    found = json.loads(results.read_text()) if results.exists() else {}
    if options.table:
        print(table(found))
        return
    torch.set_num_threads(1)
    done = {(row["arm"], row["seed"]) for row in found.get("rows", [])}
    seeds = range(5 if options.small else 3)
    todo = [(a, s) for s in seeds for a in options.arms if (a, s) not in done]
    if not todo:
        print(table(found))
        return
    data = load_preference_data(options.dataset)
    policy = Policy(options.model, [*data.pairs, *data.test_pairs])
    if options.small:
        policy.shrink(options.model)
    n_train = len(data.pairs)
    found.setdefault("before", policy.measure(policy.examples[n_train:]))
    settings = {
        "n_parameters": policy.view.n, "pairs": n_train, "held_out_pairs": len(data.test_pairs),
        "replicas": N_REPLICAS, "rounds": N_ROUNDS, "inner_steps": INNER_STEPS,
        "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    if found.setdefault("settings", settings) != settings:
        raise SystemExit(f"{results} was measured with {found['settings']}: move it away")
    for arm, seed in todo:
        row = run(policy, n_train, arm, seed)
        found.setdefault("rows", []).append(row)
        results.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(row), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
