"""Whether pairs make a real language model decide better: arms, measures, a table.

    python recipes/real_model/proof.py --model build/real-model/smollm2-135m-instruct

Trains LoRA adapters on the upper layers of a causal LM, once for each arm and seed, on the twins of
`repositories.py`, and measures each on repositories and on families that it never saw. An arm that
is done is kept in the output folder and not run again, one that is trained is only measured again
where its figures are gone; `table.json` has what there is. The
activations below the adapted layers never change and are kept while the program runs.
"""

import argparse
import hashlib
import importlib
import inspect
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
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.data.acting import end_tokens
from trainer.data.rendering import Renderer
from trainer.data.rewards import agreement, as_message, consensus_reward
from trainer.losses.channels import ReplayOptions, replay_per_pair
from trainer.losses.sdpo import sdpo_per_token
from trainer.model.loading import with_adapter, without_peft_warnings
from trainer.settings import PeftOptions

Row = tuple[list[int], list[list[int]]]
"""A prompt, and the responses behind it, as token ids."""

GENERAL_MODULES = ["ast", "base64", "cProfile", "dis", "gettext", "glob", "gzip", "shelve"]
OTHER_MODULES = """
argparse logging subprocess collections decimal statistics fractions optparse heapq textwrap pickle
doctest unittest zipfile tarfile typing threading sched ipaddress difflib enum json random shutil
tempfile urllib.request csv configparser calendar datetime asyncio re string struct socket ssl
http.client email.message mailbox getopt cmd bdb pdb trace timeit copy pprint reprlib functools
itertools operator
""".split()  # noqa: SIM905
MEASURES = ("true", "blank", "shuffled", "consensus", "executed")
TESTED: dict[str, tuple[str, str | None]] = {
    "new repositories": ("new_repositories", None),
    "new families": ("new_families", None),
    "new families, named": ("new_families", "named"),
    "new families, described": ("new_families", "described"),
}
"""What a line of the table is about: a split, and how its requests tell what is wanted."""
REPLAY = ReplayOptions(variant="simpo", simpo_beta=8.0, simpo_gamma=0.0, rpo_alpha=1.0)
"""SimPO, and the chosen side's own log-probability, which preference losses let fall."""
TWINS = (0, 1)
ARMS = (
    "untouched", "pairs", "three_channels", "swapped", "shuffled", "random", "sft", "on_policy",
)  # fmt: skip
DRIFT = 0.3
"""Weight of the divergence from the untouched model on text that has nothing to do with the task."""
GROUP = 4
"""Answers that the policy channel samples at a state."""
DISTILLATION = 0.5
"""Weight of the second channel, where there are three."""


@dataclass(frozen=True)
class Options:
    """What the arms have in common."""

    rank: int = 16
    alpha: int = 32
    first_layer: int = 12
    learning_rate: float = 1e-3
    """Reached in ten steps, and from there on a line to a twentieth of it."""
    steps: int = 300
    per_step: int = 2
    """Repositories whose twins are trained on in one step."""
    max_new_tokens: int = 40


class Policy:
    """A causal LM whose upper layers may carry adapters."""

    def __init__(self, folder: str, options: Options) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.renderer = Renderer(tokenizer=self.tokenizer)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.base = loaded.to(self.device).eval().requires_grad_(False)
        self.options = options
        self.model: Any = self.base
        self.lower: dict[str, Tensor] = {}
        self.untouched: dict[str, Tensor] = {}

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

    def adopt(self, folder: Path) -> None:
        """Put on the adapters of a folder."""
        with without_peft_warnings():
            self.model = PeftModel.from_pretrained(self.base, folder)

    def restore(self) -> None:
        """Take the adapters off."""
        if self.model is not self.base:
            self.base = self.model.unload()
            self.model = self.base

    def prompt(self, messages: Sequence[Any], hint: str | None = None) -> list[int]:
        return self.renderer.prompt_ids(messages, hint=hint)

    def response(self, message: Any) -> list[int]:
        return self.renderer.response_ids(message)

    def logps(self, rows: Sequence[Row], *, keep: bool = False) -> list[list[Tensor]]:
        """Average log-probability per token of every response, behind its prompt.

        Args:
            rows: prompts with their responses.
            keep: whether the activations below the adapted layers are worth keeping.
        """
        return [
            [
                _logps(logits, response).mean()
                for logits, response in zip(found, row[1], strict=True)
            ]
            for found, row in zip(self.logits(rows, keep=keep), rows, strict=True)
        ]

    def logits(self, rows: Sequence[Row], *, keep: bool = False) -> list[list[Tensor]]:
        """Logits at every token of every response, [T, V] each.

        One pass over a tree: what the prompts begin with in common, the rest of each prompt, the
        responses behind it.
        """
        ids, positions, mask, spans = _tree(rows)
        hidden = self._hidden(ids, positions, mask, keep=keep)
        return [[self.base.lm_head(hidden[before]) for before in by_row] for by_row in spans]

    def drift(self, window: list[int]) -> Tensor:
        """Divergence of the model from the untouched one on a text, in nats per token."""
        key = str(window)
        place = torch.tensor(window), torch.arange(len(window)), None
        if key not in self.untouched:
            with torch.no_grad(), self.model.disable_adapter():
                self.untouched[key] = self._hidden(*place, keep=True)
        with torch.no_grad():
            before = self.base.lm_head(self.untouched[key]).log_softmax(-1)
        now = self.base.lm_head(self._hidden(*place, keep=True)).log_softmax(-1)
        return F.kl_div(now, before, log_target=True, reduction="none").sum(-1).mean()

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None, *, keep: bool) -> Tensor:
        """Last hidden states of a sequence, [N, H]; without a mask it is causal."""
        ids, positions = ids.to(self.device), positions.to(self.device)
        if mask is None:
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()[None, None]
        mask = mask.to(self.device)
        body = self.base.model
        rotary = body.rotary_emb(torch.empty(1, device=self.device), positions[None])
        key = hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
        hidden = self.lower.get(key)
        if hidden is None:
            with torch.no_grad():
                hidden = body.embed_tokens(ids[None])
                hidden = self._through(0, self.options.first_layer, hidden, mask, rotary)
            if keep:
                self.lower[key] = hidden
        hidden = self._through(self.options.first_layer, len(body.layers), hidden, mask, rotary)
        return body.norm(hidden[0])

    def _through(self, first: int, last: int, hidden: Any, mask: Any, rotary: Any) -> Any:
        for layer in self.base.model.layers[first:last]:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        return hidden

    def generate(self, prompts: Sequence[list[int]], *, batch_size: int = 32) -> list[str]:
        """Answer prompts greedily."""
        return [self.text(ids) for ids in self._answers(prompts, batch_size, do_sample=False)]

    def sample(
        self, prompts: Sequence[list[int]], temperature: float, *, batch_size: int = 32
    ) -> list[list[int]]:
        """Answer prompts by sampling; ids up to the end token."""
        return self._answers(prompts, batch_size, do_sample=True, temperature=temperature)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @torch.no_grad()
    def _answers(
        self, prompts: Sequence[list[int]], batch_size: int, **how: Any
    ) -> list[list[int]]:
        answers: list[list[int]] = []
        ends = end_tokens(self.model, self.tokenizer)
        for start in range(0, len(prompts), batch_size):
            batch = self.tokenizer.pad(
                {"input_ids": list(prompts[start : start + batch_size])},
                return_tensors="pt",
            ).to(self.device)
            ids = self.model.generate(
                **batch,
                **how,
                max_new_tokens=self.options.max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=ends,
            )
            for new in ids[:, batch["input_ids"].shape[1] :].tolist():
                end = next((n for n, one in enumerate(new) if one in ends), len(new) - 1)
                answers.append(new[: end + 1])
        return answers


def _logps(logits: Tensor, response: list[int]) -> Tensor:
    """Log-probability of every token of a response, [T]."""
    ids = torch.tensor(response, device=logits.device)
    return F.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]


def _tree(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor, list[list[Tensor]]]:
    """Lay rows out as one sequence; who may look at whom is in the mask.

    Returns:
        ids and positions [N], the mask [1, 1, N, N], and for each response of each row the places
        whose hidden states predict it.
    """
    n_common = _n_common([prompt for prompt, _ in rows])
    ids, positions = list(rows[0][0][:n_common]), list(range(n_common))
    owners: list[tuple[int, int]] = [(-1, -1)] * n_common  # row and response; -1: shared
    spans: list[list[Tensor]] = []
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
            spans[-1].append(torch.tensor([last, *shared, *own][:-1]))
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
    return preference_loss(good, bad)


def preference_loss(good: Tensor, bad: Tensor) -> Tensor:
    """Charge for pairs what the trainer's third channel does; sides are averages over tokens."""
    one = torch.ones_like(good)
    return replay_per_pair(good, bad, one, one, None, None, REPLAY).mean()


def three_channels_loss(
    policy: Policy,
    repository: Repository,
    pool: Sequence[Repository],
    draw: random.Random,
) -> Tensor:
    """Add what the policy's own answers at one of both states earn, and what a hint says of them.

    The policy channel is REINFORCE against the group's mean, which is GRPO's gradient where each
    answer is used once; the second is the divergence from the same model that was told the right
    action (SDPO, arXiv:2601.20802).
    """
    wanted = draw.randrange(2)
    right = repository.calls[wanted]
    messages = repository.prompt(wanted)
    answers = policy.sample([policy.prompt(messages)] * GROUP, 1.0)
    rewards = torch.tensor(
        [consensus_reward(as_message(policy.text(ids)), {"consensus": right}) for ids in answers]
    )
    hint = f"The right answer is {json.dumps(right['tool_calls'][0]['function'])}"
    [logits] = policy.logits([(policy.prompt(messages), answers)])
    with torch.no_grad():
        [hinted] = policy.logits([(policy.prompt(messages, hint), answers)])
    logps = torch.stack([_logps(*one).mean() for one in zip(logits, answers, strict=True)])
    earned = -((rewards - rewards.mean()).to(logps) * logps).mean()
    pulled = torch.stack(
        [sdpo_per_token(*both).mean() for both in zip(logits, hinted, strict=True)]
    )
    return (
        contrast_loss(policy, "pairs", repository, pool, draw)
        + earned
        + DISTILLATION * pulled.mean()
    )


def sft_rows(policy: Policy, repository: Repository) -> list[Row]:
    """Put the right action alone behind each prompt."""
    return [
        (prompt, [both[right]])
        for right, (prompt, both) in enumerate(twin_rows(policy, repository))
    ]


def trained(
    policy: Policy, arm: str, seed: int, pool: Sequence[Repository], folder: Path
) -> dict[str, Any]:
    """Train one arm and keep it, or take it from where it is kept; returns what `train` does."""
    told = folder / "training.json"
    if told.is_file():
        policy.adopt(folder)
        return json.loads(told.read_text("utf-8"))
    training = train(policy, arm, seed, pool)
    policy.model.save_pretrained(folder)
    told.write_text(json.dumps(training), "utf-8")  # last: it says that the adapters are whole
    return training


def train(policy: Policy, arm: str, seed: int, pool: Sequence[Repository]) -> dict[str, Any]:
    """Train one arm; returns what it cost and its losses."""
    options, draw = policy.options, random.Random(seed)
    policy.adapt(seed)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / 10, max(0.05, 1 - n / options.steps))
    )
    elsewhere = other_text(policy)
    losses: list[float] = []
    started = time.process_time()
    order: list[Repository] = []
    samples: dict[tuple[int, int], list[int]] = {}
    while len(losses) < options.steps:
        # Twice: at first a model's samples are prose, later they are calls.
        if arm == "on_policy" and len(losses) in (0, options.steps // 2):
            samples = on_policy_samples(policy, pool, seed + len(losses))
        total = 0.0
        # SFT sees half of the responses of a repository, and so more of them for as many tokens.
        for place in range(options.per_step * (2 if arm == "sft" else 1)):
            if not order:
                order = draw.sample(list(pool), len(pool))
            repository = order.pop()
            if arm == "on_policy":
                loss = on_policy_loss(policy, repository, samples)
            elif arm == "sft":
                sides = policy.logps(sft_rows(policy, repository), keep=True)
                loss = -torch.stack([one for [one] in sides]).mean()
            elif arm == "three_channels" and place == 0:  # sampling takes most of the time
                loss = three_channels_loss(policy, repository, pool, draw)
            else:
                contrast = "pairs" if arm == "three_channels" else arm
                loss = contrast_loss(policy, contrast, repository, pool, draw)
            (loss / options.per_step).backward()
            total += loss.item() / options.per_step
        (DRIFT * policy.drift(draw.choice(elsewhere))).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        if len(losses) % 20 == 0:
            last = sum(losses[-20:]) / 20
            print(f"{arm} {seed}: step {len(losses)}, loss {last:.3f}", flush=True)
    return {
        "steps": len(losses),
        "loss_first_20": sum(losses[:20]) / 20,
        "loss_last_20": sum(losses[-20:]) / 20,
        "cpu_s": time.process_time() - started,
    }


def on_policy_samples(
    policy: Policy, pool: Sequence[Repository], seed: int
) -> dict[tuple[int, int], list[int]]:
    """Sample the model as it is at every state that is trained on."""
    torch.manual_seed(seed)
    states = [(one, wanted) for one in pool for wanted in TWINS]
    answers = policy.sample([policy.prompt(one.prompt(wanted)) for one, wanted in states], 0.7)
    n_agree = sum(
        agreement(as_message(policy.text(ids)), one.calls[wanted]) == "exact"
        for (one, wanted), ids in zip(states, answers, strict=True)
    )
    print(
        f"on-policy samples: {n_agree} of {len(states)} agree with the consensus",
        flush=True,
    )
    return {(one.number, wanted): ids for (one, wanted), ids in zip(states, answers, strict=True)}


def on_policy_loss(
    policy: Policy, repository: Repository, samples: dict[tuple[int, int], list[int]]
) -> Tensor:
    """Prefer the consensus to the model's own sample; where they agree, imitate it."""
    rows: list[Row] = []
    for wanted in TWINS:
        sample = samples[repository.number, wanted]
        right = repository.calls[wanted]
        sides = [policy.response(right)]
        if agreement(as_message(policy.text(sample)), right) != "exact":
            sides.append(sample)
        rows.append((policy.prompt(repository.prompt(wanted)), sides))
    losses: list[Tensor] = []
    for good, *bad in policy.logps(rows):
        losses.append(preference_loss(good, bad[0]) if bad else -REPLAY.rpo_alpha * good)
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
    acting, controlled = (
        set(draw.sample(list(tested), math.ceil(len(tested) / every)))
        for every in (act_every, controls_every)
    )
    blank = policy.prompt(conversation(BLANK))
    states: list[dict[str, Any]] = []
    for one in tested:
        rows = twin_rows(policy, one)
        sides = {"true": policy.logps(rows)}
        if one in controlled:
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
                "how": one.family.how,
                "split": one.split,
                **{name: _hit(found[wanted], wanted) for name, found in sides.items()},
            }
            for wanted in TWINS
        ]
    asked = [
        (state, one, wanted)
        for state, (one, wanted) in zip(states, product(tested, TWINS), strict=True)
        if with_actions and one in acting
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
    batches = (torch.tensor([window], device=policy.device) for window in windows)
    losses = [policy.model(input_ids=one, labels=one).loss.item() for one in batches]
    return sum(losses) / len(losses)


def general_text(policy: Policy, n_tokens: int = 192) -> list[list[int]]:
    """Windows of prose and of code: CPython's language reference, and modules of its library."""
    prose = [topics[name] for name in sorted(topics)]
    code = [inspect.getsource(importlib.import_module(name)) for name in GENERAL_MODULES]
    return [*_windows(policy, prose, n_tokens)[:16], *_windows(policy, code, n_tokens)]


def other_text(policy: Policy, n_tokens: int = 96) -> list[list[int]]:
    """Windows of doc strings, none of them in the general text."""
    texts = []
    for name in OTHER_MODULES:
        module = importlib.import_module(name)
        members = (getattr(module, member, None) for member in sorted(dir(module))[:60])
        docs = [getattr(one, "__doc__", None) for one in (module, *members)]
        texts.append("\n".join(doc for doc in docs if isinstance(doc, str)))
    return _windows(policy, texts, n_tokens)


def _windows(policy: Policy, texts: Sequence[str], n_tokens: int) -> list[list[int]]:
    windows = (policy.tokenizer(text)["input_ids"][:n_tokens] for text in texts)
    return [window for window in windows if len(window) == n_tokens]


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
        for part in TESTED:
            rows = [state for run in of_arm for state in _states(run, part)]
            figures: dict[str, Any] = {"n_states": len(rows) // len(of_arm)}
            for name in MEASURES:
                hits = [(s["repository"], float(s[name])) for s in rows if name in s]
                figures[name] = interval(hits) if hits else None
            figures["true_by_family"] = _by_family(rows)
            if untouched is not None and arm != "untouched":
                before = [state["true"] for state in _states(untouched, part)]
                figures["mcnemar_p"] = [
                    mcnemar(before, [state["true"] for state in _states(run, part)])
                    for run in of_arm
                ]
            found[arm][part] = figures
        found[arm]["general_loss"] = [round(run["general_loss"], 4) for run in of_arm]
        found[arm]["training"] = [run.get("training") for run in of_arm]
    return found


def _states(run: dict[str, Any], part: str) -> list[dict[str, Any]]:
    split, how = TESTED[part]
    return [s for s in run["states"] if s["split"] == split and how in (None, s["how"])]


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
        "--controls-every",
        type=int,
        default=2,
        help="other prompts at every n-th repository",
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
            path = given.output / f"{name_of(arm, options)}-{seed}.json"
            if path.is_file() or (arm == "untouched" and seed != given.seeds[0]):
                continue
            if policy is None:
                policy = Policy(given.model, options)
                general = general_text(policy)
            training = None
            if arm != "untouched":
                training = trained(policy, arm, seed, pool, path.with_suffix(""))
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
            _write_table(given.output, pool, tested)
    _write_table(given.output, pool, tested)


def name_of(arm: str, options: Options) -> str:
    """Name an arm in the table: with its steps, where they are others than usual."""
    is_usual = arm == "untouched" or options.steps == Options.steps
    return arm if is_usual else f"{arm}_{options.steps}"


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
    for arm, part in product(found["arms"], TESTED):
        figures = found["arms"][arm][part]
        cells = [_percent(figures[name]) for name in MEASURES]
        loss = ", ".join(f"{one:.3f}" for one in found["arms"][arm]["general_loss"])
        p = ", ".join(f"{one:.1g}" for one in figures.get("mcnemar_p", ())) or "—"
        where = f"{part}: {figures['n_states']} states"
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
