"""Whether pairs make a real language model decide better: arms, measures, a table.

    python recipes/real_model/proof.py --model build/real-model/smollm2-135m-instruct

Trains LoRA adapters on the upper layers of a causal LM, once for each arm and seed, on the twins of
`repositories.py`, and measures each on repositories and on families that it never saw. An arm that
is done is kept in the output folder and not run again; `table.json` has what there is. The
activations below the adapted layers never change and are kept as well.
"""

import argparse
import hashlib
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from repositories import BLANK, Repository, conversation, execute, repositories
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.data.evaluation import end_tokens
from trainer.data.rendering import Renderer
from trainer.data.rewards import agreement, as_message
from trainer.integrations.loading import with_adapter, without_peft_warnings
from trainer.integrations.settings import PeftOptions
from trainer.losses.preference import simpo_loss

Row = tuple[list[int], list[list[int]]]
"""A prompt, and the responses behind it, as token ids."""

MEASURES = ("true", "blank", "shuffled", "consensus", "executed")
TESTED = ("new_repositories", "new_families")
BETA = 8.0
TWINS = (0, 1)
ARMS = ("untouched", "pairs", "then_sft", "swapped", "shuffled", "random", "sft", "on_policy")
ANCHOR = 0.1
"""Weight of the log-probability of the chosen side, which preference losses let fall."""


@dataclass(frozen=True)
class Options:
    """What the arms have in common."""

    rank: int = 16
    alpha: int = 32
    first_layer: int = 12
    learning_rate: float = 1e-3
    steps: int = 100
    """Twins that are trained on, one a step."""
    max_new_tokens: int = 40


class Policy:
    """A causal LM whose upper layers may carry adapters."""

    def __init__(self, folder: str, options: Options, cache: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.renderer = Renderer(tokenizer=self.tokenizer)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.base = loaded.to(self.device).eval().requires_grad_(False)
        self.options = options
        self.model: Any = self.base
        self.cache = cache
        self.lower: dict[str, Tensor] = load_file(cache) if cache.is_file() else {}

    def adapt(self, seed: int) -> None:
        """Put fresh adapters on the upper layers."""
        torch.manual_seed(seed)
        peft = PeftOptions(
            rank=self.options.rank,
            alpha=self.options.alpha,
            targets=["q_proj", "k_proj", "v_proj", "o_proj"],
            layers=f"{self.options.first_layer}-{len(self.base.model.layers) - 1}",
        )
        self.model = with_adapter(self.base, peft)

    def adapt_from(self, folder: Path) -> None:
        """Go on with the adapters of another arm."""
        with without_peft_warnings():
            self.model = PeftModel.from_pretrained(self.base, str(folder), is_trainable=True)

    def restore(self) -> None:
        """Take the adapters off."""
        if self.model is not self.base:
            self.base = self.model.unload()
            self.model = self.base

    def prompt(self, messages: Sequence[Any]) -> list[int]:
        return self.renderer.prompt_ids(messages)

    def response(self, message: Any) -> list[int]:
        return self.renderer.response_ids(message)

    def logps(self, rows: Sequence[Row], *, keep: bool = False) -> list[list[Tensor]]:
        """Average log-probability per token of every response, behind its prompt.

        One pass over a tree: what the prompts begin with in common, the rest of each prompt, the
        responses behind it.

        Args:
            rows: prompts with their responses.
            keep: whether the activations below the adapted layers are worth keeping.
        """
        ids, positions, mask, spans = _tree(rows)
        ids, positions, mask = ids.to(self.device), positions.to(self.device), mask.to(self.device)
        body = self.base.model
        rotary = body.rotary_emb(torch.empty(1, device=self.device), positions[None])
        key = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
        if key in self.lower:
            hidden = self.lower[key].to(self.device)
        else:
            with torch.no_grad():
                hidden = body.embed_tokens(ids[None])
                hidden = self._through(0, self.options.first_layer, hidden, mask, rotary)
            if keep:
                self.lower[key] = hidden.cpu()
        hidden = self._through(self.options.first_layer, len(body.layers), hidden, mask, rotary)
        hidden = body.norm(hidden[0])
        found: list[list[Tensor]] = []
        for by_row in spans:
            found.append([])
            for before, targets in by_row:
                logits = self.base.lm_head(hidden[before])
                picked = F.log_softmax(logits, -1).gather(1, targets[:, None].to(self.device))
                found[-1].append(picked.mean())
        return found

    def _through(self, first: int, last: int, hidden: Any, mask: Any, rotary: Any) -> Any:
        for layer in self.base.model.layers[first:last]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        return hidden

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[list[int]], *, temperature: float = 0.0, batch_size: int = 32
    ) -> list[str]:
        """Answer prompts, greedily unless a temperature is given."""
        answers: list[str] = []
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        for start in range(0, len(prompts), batch_size):
            batch = self.tokenizer.pad(
                {"input_ids": list(prompts[start : start + batch_size])}, return_tensors="pt"
            ).to(self.device)
            ids = self.model.generate(
                **batch,
                **(sampling or {"do_sample": False}),
                max_new_tokens=self.options.max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=end_tokens(self.model, self.tokenizer),
            )
            new = ids[:, batch["input_ids"].shape[1] :]
            answers += self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers

    def save_lower(self) -> None:
        self.cache.parent.mkdir(parents=True, exist_ok=True)
        save_file(self.lower, self.cache)


def _tree(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, list[list[tuple[Tensor, Tensor]]]]:
    """Lay rows out as one sequence; who may look at whom is in the mask.

    Returns:
        ids and positions [N], the mask [1, 1, N, N], and for each response of each row the places
        whose hidden states predict it, with its ids.
    """
    n_common = _n_common([prompt for prompt, _ in rows])
    ids, positions = list(rows[0][0][:n_common]), list(range(n_common))
    owners: list[tuple[int, int]] = [(-1, -1)] * n_common  # row and response; -1: shared
    spans: list[list[tuple[Tensor, Tensor]]] = []
    for place, (prompt, responses) in enumerate(rows):
        ids += prompt[n_common:]
        positions += range(n_common, len(prompt))
        owners += [(place, -1)] * (len(prompt) - n_common)
        last = len(ids) - 1 if len(prompt) > n_common else n_common - 1
        spans.append([])
        # The two actions differ in a few tokens; what they begin with is laid out once as well.
        n_same = _n_common(responses) if len(responses) > 1 else 0
        shared = list(range(len(ids), len(ids) + n_same))
        ids += responses[0][:n_same]
        positions += range(len(prompt), len(prompt) + n_same)
        owners += [(place, -1)] * n_same
        for which, response in enumerate(responses):
            own = list(range(len(ids), len(ids) + len(response) - n_same))
            before = torch.tensor([last, *shared, *own][:-1])
            spans[-1].append((before, torch.tensor(response)))
            ids += response[n_same:]
            positions += range(len(prompt) + n_same, len(prompt) + len(response))
            owners += [(place, which)] * len(own)
    row_N, response_N = torch.tensor(owners).T
    same_row = (row_N[None] == -1) | (row_N[None] == row_N[:, None])
    same_response = (response_N[None] == -1) | (response_N[None] == response_N[:, None])
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask = (causal & same_row & same_response)[None, None]
    return torch.tensor(ids), torch.tensor(positions), mask, spans


def _n_common(sequences: Sequence[list[int]]) -> int:
    """Length of the longest common prefix."""
    columns = enumerate(zip(*sequences, strict=False))
    return next((n for n, ids in columns if len(set(ids)) > 1), min(map(len, sequences)))


# --- arms ----------------------------------------------------------------------------------------


def twin_rows(policy: Policy, repository: Repository, shown: Repository | None = None) -> list[Row]:
    """Put both actions behind the prompts of both twins, or behind those of another repository."""
    responses = [policy.response(call) for call in repository.calls]
    return [(policy.prompt((shown or repository).prompt(wanted)), responses) for wanted in TWINS]


def contrast_loss(
    policy: Policy,
    arm: str,
    repository: Repository,
    pool: Sequence[Repository],
    draw: random.Random,
) -> Tensor:
    """Contrast both actions behind both prompts, with the labels and prompts of an arm."""
    shown, chosen = repository, TWINS
    if arm == "swapped":
        chosen = TWINS[::-1]
    elif arm == "random":
        chosen = (draw.randrange(2), draw.randrange(2))
    elif arm == "shuffled":
        shown = draw.choice([one for one in pool if one.family is not repository.family])
    sides = policy.logps(twin_rows(policy, repository, shown), keep=shown is repository)
    good = torch.stack([both[c] for both, c in zip(sides, chosen, strict=True)])
    bad = torch.stack([both[1 - c] for both, c in zip(sides, chosen, strict=True)])
    anchor = 1.0 if arm == "then_sft" else ANCHOR
    return simpo_loss(good, bad, beta=BETA, gamma=0.0) - anchor * good.mean()


def sft_rows(policy: Policy, repository: Repository) -> list[Row]:
    """Put the right action alone behind each prompt."""
    return [
        (prompt, [both[right]])
        for right, (prompt, both) in enumerate(twin_rows(policy, repository))
    ]


def train(
    policy: Policy, arm: str, seed: int, pool: Sequence[Repository], output: Path
) -> dict[str, Any]:
    """Train one arm; returns what it cost and its losses."""
    options, draw = policy.options, random.Random(seed)
    steps = options.steps
    if arm == "then_sft":
        # The contrast teaches which action is better, and lets both become unlikely.
        policy.adapt_from(output / f"pairs-{seed}")
        steps, draw = steps // 3, random.Random(-1 - seed)
    else:
        policy.adapt(seed)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    started = time.process_time()
    # SFT sees half of the responses in a step, and so does more steps for as many tokens.
    rows_of = sft_rows if arm == "sft" else twin_rows
    per_step = len(_tree(rows_of(policy, pool[0]))[0])
    budget = steps * len(_tree(twin_rows(policy, pool[0]))[0])
    order: list[Repository] = []
    samples: dict[tuple[int, int], str] = {}
    while len(losses) * per_step < budget:
        if not order:
            order = draw.sample(list(pool), len(pool))
        repository = order.pop()
        if arm == "on_policy":
            # Twice: at first a model's samples are prose, later they are calls.
            if len(losses) in (0, options.steps // 2):
                samples = on_policy_samples(policy, pool, seed + len(losses))
            loss = on_policy_loss(policy, repository, samples)
        elif arm == "sft":
            sides = policy.logps(sft_rows(policy, repository))
            loss = -torch.stack([one for [one] in sides]).mean()
        else:
            loss = contrast_loss(policy, arm, repository, pool, draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 20 == 0:
            print(
                f"{arm} {seed}: step {len(losses)}, loss {sum(losses[-20:]) / 20:.3f}", flush=True
            )
    return {
        "steps": len(losses),
        "loss_first_20": sum(losses[:20]) / 20,
        "loss_last_20": sum(losses[-20:]) / 20,
        "cpu_s": time.process_time() - started,
    }


def on_policy_samples(
    policy: Policy, pool: Sequence[Repository], seed: int
) -> dict[tuple[int, int], str]:
    """Sample the model as it is at every state that is trained on."""
    torch.manual_seed(seed)
    states = [(one, wanted) for one in pool for wanted in TWINS]
    prompts = [policy.prompt(one.prompt(wanted)) for one, wanted in states]
    answers = policy.generate(prompts, temperature=0.7)
    n_agree = sum(
        agreement(as_message(text), one.calls[wanted]) == "exact"
        for (one, wanted), text in zip(states, answers, strict=True)
    )
    print(f"on-policy samples: {n_agree} of {len(states)} agree with the consensus", flush=True)
    return {(one.number, wanted): text for (one, wanted), text in zip(states, answers, strict=True)}


def on_policy_loss(
    policy: Policy, repository: Repository, samples: dict[tuple[int, int], str]
) -> Tensor:
    """Prefer the consensus to the model's own sample; where they agree, imitate it."""
    rows: list[Row] = []
    for wanted in TWINS:
        text = samples[repository.number, wanted]
        sides = [policy.response(repository.calls[wanted])]
        if agreement(as_message(text), repository.calls[wanted]) != "exact":
            sides.append(policy.response({"role": "assistant", "content": text}))
        rows.append((policy.prompt(repository.prompt(wanted)), sides))
    losses: list[Tensor] = []
    for good, *bad in policy.logps(rows):
        contrast = simpo_loss(good[None], bad[0][None], beta=BETA, gamma=0.0) if bad else 0.0
        losses.append(contrast - ANCHOR * good)
    return torch.stack(losses).mean()


# --- measures ------------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    policy: Policy,
    tested: Sequence[Repository],
    general: Sequence[list[int]],
    *,
    with_actions: bool = True,
    act_every: int = 1,
    controls_every: int = 2,
) -> dict[str, Any]:
    """Measure one model: hits of every pair under three prompts, greedy actions, general loss.

    Blank and foreign prompts cost a pass of their own: not every repository is shown them.
    """
    draw = random.Random(0)
    blank = policy.prompt(conversation(BLANK))
    states: list[dict[str, Any]] = []
    for one in tested:
        rows = twin_rows(policy, one)
        sides = {"true": policy.logps(rows, keep=True)}
        if one.number % controls_every == 0:
            both = rows[0][1]
            sides["blank"] = policy.logps([(blank, both)]) * 2
            strangers = draw.sample([other for other in tested if other is not one], 2)
            sides["shuffled"] = policy.logps(
                [(policy.prompt(other.prompt(draw.randrange(2))), both) for other in strangers]
            )
        states += [
            {
                "repository": one.number,
                "family": one.family.name,
                "split": one.split,
                **{name: _hit(found[wanted], wanted) for name, found in sides.items()},
            }
            for wanted in TWINS
        ]
    asked = [
        (state, one, wanted)
        for state, (one, wanted) in zip(states, product(tested, TWINS), strict=True)
        if with_actions and one.number % act_every == 0
    ]
    answers = policy.generate([policy.prompt(one.prompt(wanted)) for _, one, wanted in asked])
    for (state, one, wanted), text in zip(asked, answers, strict=True):
        message = as_message(text)
        state["answer"] = text
        state["consensus"] = float(agreement(message, one.calls[wanted]) == "exact")
        state["outcome"] = execute(message, one, wanted)
        state["executed"] = float(state["outcome"] == "success")
    return {"states": states, "general_loss": general_loss(policy, general)}


def _hit(both: Sequence[Tensor], right: int) -> float:
    return 0.5 if both[0] == both[1] else float(both[right] > both[1 - right])


@torch.no_grad()
def general_loss(policy: Policy, windows: Sequence[list[int]]) -> float:
    """Mean loss per token on text that has nothing to do with the task, in nats."""
    batch = torch.tensor(windows, device=policy.device)
    return policy.model(input_ids=batch, labels=batch).loss.item()


def general_text(policy: Policy, n_windows: int = 16, n_tokens: int = 192) -> list[list[int]]:
    """Windows of the language reference that CPython brings along."""
    names = sorted(topics)
    windows = (policy.tokenizer(topics[name])["input_ids"][:n_tokens] for name in names)
    return [window for window in windows if len(window) == n_tokens][:n_windows]


def ngram_baseline(trained: Sequence[Repository], tested: Sequence[Repository]) -> dict[str, float]:
    """Accuracy of a linear model on word n-grams of prompt and action, and on their products."""
    weights: Counter[str] = Counter()

    def features(one: Repository, wanted: int, which: int) -> Counter[str]:
        action = json.dumps(one.calls[which]["tool_calls"][0]["function"]["arguments"])
        prompt, response = (_ngrams(t) for t in (one.prompt(wanted)[-1]["content"], action))
        return Counter([*response, *(f"{a}|{b}" for a in prompt for b in response)])

    states = [*product(trained, TWINS)]
    draw = random.Random(0)
    for _ in range(3):  # a perceptron; more rounds change nothing
        draw.shuffle(states)
        for one, wanted in states:
            good, bad = (features(one, wanted, which) for which in (wanted, 1 - wanted))
            if _score(weights, good) <= _score(weights, bad):
                weights.update(good)
                weights.subtract(bad)
    hits: dict[str, list[float]] = defaultdict(list)
    for one, wanted in product(tested, TWINS):
        good, bad = (_score(weights, features(one, wanted, w)) for w in (wanted, 1 - wanted))
        hits[one.split].append(0.5 if good == bad else float(good > bad))
    return {split: round(sum(found) / len(found), 4) for split, found in hits.items()}


def _ngrams(text: str) -> set[str]:
    words = _words(text)
    return {" ".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words) - n + 1)}


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text).split()


def _score(weights: Counter[str], features: Counter[str]) -> int:
    return sum(weights[name] * n for name, n in features.items() if name in weights)


# --- table ---------------------------------------------------------------------------------------


def interval(values: Sequence[tuple[int, float]], n_draws: int = 2_000) -> list[float]:
    """Mean with its 95 % bootstrap interval; whole repositories are drawn, as twins hang together."""
    groups: dict[int, list[float]] = defaultdict(list)
    for group, value in values:
        groups[group].append(value)
    sums = [(sum(found), len(found)) for found in groups.values()]
    draw = random.Random(0)
    means = []
    for _ in range(n_draws):
        drawn = draw.choices(sums, k=len(sums))
        means.append(sum(s for s, _ in drawn) / sum(n for _, n in drawn))
    means.sort()
    mean = sum(value for _, value in values) / len(values)
    return [round(x, 4) for x in (mean, means[n_draws // 40], means[-n_draws // 40])]


def mcnemar(before: Sequence[float], after: Sequence[float]) -> float:
    """Exact two-sided p of the states that only one of two models gets right."""
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


def table(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sum every run up; seeds of an arm stand next to each other and are joined as well."""
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, run in sorted(runs.items()):
        arms[name.rpartition("-")[0]].append(run)
    untouched = arms["untouched"][0] if "untouched" in arms else None
    found: dict[str, Any] = {}
    for arm, of_arm in arms.items():
        found[arm] = {"seeds": len(of_arm)}
        for split in TESTED:
            rows = [s for run in of_arm for s in run["states"] if s["split"] == split]
            figures: dict[str, Any] = {"n_states": len(rows) // len(of_arm)}
            for name in MEASURES:
                hits = [(s["repository"], float(s[name])) for s in rows if name in s]
                figures[name] = interval(hits) if hits else None
            figures["true_by_family"] = _by_family(rows)
            if untouched is not None and arm != "untouched":
                before = [s["true"] for s in untouched["states"] if s["split"] == split]
                figures["mcnemar_p"] = [
                    mcnemar(before, [s["true"] for s in run["states"] if s["split"] == split])
                    for run in of_arm
                ]
            found[arm][split] = figures
        found[arm]["general_loss"] = [round(run["general_loss"], 4) for run in of_arm]
        found[arm]["training"] = [run.get("training") for run in of_arm]
    return found


def _by_family(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    by_family: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_family[row["family"]].append(row["true"])
    return {name: round(sum(hits) / len(hits), 3) for name, hits in by_family.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="build/real-model/smollm2-135m-instruct")
    parser.add_argument("--output", type=Path, default=Path("build/proof"))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--likely-only", nargs="*", default=[], help="arms without greedy actions")
    parser.add_argument("--act-every", type=int, default=1, help="act on every n-th repository")
    parser.add_argument(
        "--controls-every", type=int, default=2, help="other prompts at every n-th repository"
    )
    parser.add_argument("--steps", type=int, default=Options.steps)
    given = parser.parse_args()
    options = Options(steps=given.steps)
    everything = repositories()
    pool = [one for one in everything if one.split == "train"]
    tested = [one for one in everything if one.split != "train"]
    given.output.mkdir(parents=True, exist_ok=True)
    policy: Policy | None = None
    for seed in given.seeds:
        for arm in given.arms:
            path = given.output / f"{arm}-{seed}.json"
            if path.is_file() or (arm == "untouched" and seed != given.seeds[0]):
                continue
            if policy is None:
                policy = Policy(given.model, options, given.output / "lower.safetensors")
                general = general_text(policy)
            training = None
            if arm != "untouched":
                training = train(policy, arm, seed, pool, given.output)
                policy.model.save_pretrained(given.output / f"{arm}-{seed}")
            measured = measure(
                policy,
                tested,
                general,
                with_actions=arm not in given.likely_only,
                act_every=given.act_every,
                controls_every=given.controls_every,
            )
            policy.restore()
            path.write_text(json.dumps({"training": training, **measured}, indent=1), "utf-8")
            policy.save_lower()
            _write_table(given.output, pool, tested)
    _write_table(given.output, pool, tested)


def _write_table(output: Path, pool: list[Repository], tested: list[Repository]) -> None:
    runs = {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in output.glob("*-[0-9]*.json")
        if path.is_file()
    }
    found = {"arms": table(runs), "ngrams": ngram_baseline(pool, tested)}
    (output / "table.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(as_markdown(found), flush=True)


def as_markdown(found: dict[str, Any]) -> str:
    """Write the table of `table.json` for people: shares in percent, intervals in brackets."""
    lines = [
        "| arm, seeds | tested on | " + " | ".join(MEASURES) + " | general loss | p |",
        "|" + "---|" * (len(MEASURES) + 4),
    ]
    for arm, split in product(found["arms"], TESTED):
        figures = found["arms"][arm][split]
        cells = [_percent(figures[name]) for name in MEASURES]
        loss = ", ".join(f"{one:.3f}" for one in found["arms"][arm]["general_loss"])
        p = ", ".join(f"{one:.1g}" for one in figures.get("mcnemar_p", ())) or "—"
        where = f"{split.replace('_', ' ')}, {figures['n_states']} states"
        cells = [f"{arm}, {found['arms'][arm]['seeds']}", where, *cells, loss, p]
        lines.append(f"| {' | '.join(cells)} |")
    ngrams = ", ".join(f"{100 * one:.1f} % on {name}" for name, one in found["ngrams"].items())
    return "\n".join([*lines, "", f"Word n-grams: {ngrams.replace('_', ' ')}."])


def _percent(figure: list[float] | None) -> str:
    if figure is None:
        return "—"
    mean, low, high = (f"{100 * one:.1f}" for one in figure)
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    main()
