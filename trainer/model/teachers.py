"""Frozen teachers, which score each token of an answer, in this process or on a server.

A teacher sees the trainee's conversation in its own chat template, and then the trainee's answer in
its own tokens (`trainer.data.alignment`).
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from trainer.data.alignment import Group, TokenAlignment
from trainer.data.budget import sides_of
from trainer.data.rendering import Renderer
from trainer.data.template import plain_messages
from trainer.errors import TrainerConfigError, TrainerError
from trainer.model.loading import load_base
from trainer.settings import RunConfig, TeacherOptions

__all__ = ["FrozenTeacher", "ScoringServer", "TeacherView", "load_teachers"]

logger = logging.getLogger(__name__)

TokenScores = Mapping[int, float]
"""Log-probabilities by token id: the most likely tokens, and the actual token."""

ATTEMPTS = 4
"""The most attempts at a server that doesn't answer."""
FIRST_PAUSE_S = 1.0
TIMEOUT_S = 600.0
LEAST = -100.0
"""Log-probability that stands for minus infinity, as servers write it for impossible tokens."""
CONCURRENCY = 8
"""The most concurrent requests of one process to a server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherView:
    """A rollout in a teacher's tokens."""

    prompt_ids: list[int]
    answer_ids: list[int]
    groups: list[Group]
    """Groups of tokens with the same text, in the trainee's and the teacher's tokenization."""
    scores: list[TokenScores] | None = None
    """Scores of each token of `answer_ids`, if they come from a server."""


@dataclass(kw_only=True)
class FrozenTeacher:
    """One of the models that channel 3 follows."""

    name: str
    weight: float
    """Its share of the loss. The weights of all teachers add up to 1."""
    alignment: TokenAlignment
    renderer: Renderer
    """Renders prompts in the teacher's template."""
    reader: Renderer
    """Renders the trainee's prompts."""
    n_positions: int | None
    model: nn.Module | None
    """The model, or None if it is on a server."""
    server: "ScoringServer | None" = None
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of `tokens` in the trainee's answers: `aligned` ones match one token of the teacher,
    and `in_spans` match in a group. Also `answers`, `cut_prompts` (longer than the teacher's
    context), and `answers_not_lossless` (its tokenizer doesn't reproduce them)."""

    def views(
        self, rows: Sequence[Mapping[str, Any]], answers: Sequence[tuple[list[int], list[int]]]
    ) -> list[TeacherView]:
        """Return rollouts in this teacher's tokens, with scores if it is on a server.

        Args:
            rows: `prompt`, `tools`, and sides of each rollout's state.
            answers: the trainee's ids of prompt and answer, for each rollout.

        Raises:
            TrainerError: the server doesn't answer, or returns no log-probabilities of prompts.
        """
        found = [self._view(row, *ids) for row, ids in zip(rows, answers, strict=True)]
        if self.server is None:
            return found
        scored = self.server.scores([(one.prompt_ids, one.answer_ids) for one in found])
        return [replace(one, scores=scores) for one, scores in zip(found, scored, strict=True)]

    def as_report(self) -> dict[str, Any]:
        """Return the facts about the teacher as JSON. Counts are for this process's rollouts."""
        return {
            "name": self.name,
            "weight": round(self.weight, 4),
            "has_trainees_tokenizer": self.alignment.is_same,
            "shared_tokens": len(self.alignment.common),
            **{name: n for name, n in self.counts.items() if n},
        }

    def _view(
        self, row: Mapping[str, Any], prompt_ids: list[int], answer_ids: list[int]
    ) -> TeacherView:
        answer = self.alignment.answer(answer_ids)
        alone = sum(len(mine) == len(theirs) == 1 for mine, theirs in answer.groups)
        covered = sum(len(mine) for mine, _ in answer.groups)
        self.counts.update(
            answers=1, tokens=len(answer_ids), aligned=alone, in_spans=covered - alone
        )
        self.counts["answers_not_lossless"] += bool(answer_ids) and not answer.ids
        prompt = self._prompt_ids(row, prompt_ids)
        room = (self.n_positions or math.inf) - len(answer.ids)
        if len(prompt) > room:
            self.counts["cut_prompts"] += 1
            prompt = prompt[len(prompt) - max(int(room), 1) :]
        return TeacherView(prompt_ids=prompt, answer_ids=answer.ids, groups=answer.groups)

    def _prompt_ids(self, row: Mapping[str, Any], prompt_ids: list[int]) -> list[int]:
        mine, theirs = self.reader.tokenizer, self.renderer.tokenizer
        if self.alignment.is_same and mine.chat_template == theirs.chat_template:
            return list(prompt_ids)
        messages, tools = self.reader.kept(row["prompt"], row.get("tools"), sides=sides_of(row))
        # Written as the trainee writes calls, so that its form of a call is no surprise.
        shown = plain_messages(messages, tools, self.reader.features)
        native = tools if self.reader.features.has_tools else None
        return self.renderer.prompt(shown, native)[0]


class ScoringServer:
    """The client of a server that returns log-probabilities of prompt tokens, in vLLM's form."""

    def __init__(self, url: str, name: str, *, top_k: int) -> None:
        """Keep where it is; nothing is sent yet."""
        self._url, self._name, self._top_k = url.rstrip("/"), name, top_k

    def scores(self, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[TokenScores]]:
        """Return, for each prompt and answer, the scores of the answer's tokens.

        Raises:
            TrainerError: it doesn't answer, or returns no log-probabilities of prompts.
        """
        with httpx.Client(timeout=TIMEOUT_S) as client, ThreadPoolExecutor(CONCURRENCY) as pool:
            return list(pool.map(lambda one: self._scores(client, *one), sequences))

    def _scores(
        self, client: httpx.Client, prompt_ids: list[int], answer_ids: list[int]
    ) -> list[TokenScores]:
        if not answer_ids:
            return []
        ids = prompt_ids + answer_ids
        asked = {"model": self._name, "prompt": ids, "max_tokens": 1, "temperature": 1.0}
        reply = self._post(client, asked | {"prompt_logprobs": self._top_k})
        try:
            positions = reply["choices"][0]["prompt_logprobs"]
            found = [
                {int(i): float(entry["logprob"]) for i, entry in (of_token or {}).items()}
                for of_token in positions[len(prompt_ids) :]
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise TrainerError(
                f"{self._url}: returns no log-probabilities of a prompt's tokens (prompt_logprobs). vLLM and `python -m trainer serve` do; `transformers serve` and llama.cpp's server do not. Or leave out url to load the weights here"
            ) from error
        if len(positions) != len(ids) or any(
            token_id not in of_token for token_id, of_token in zip(answer_ids, found, strict=True)
        ):
            raise TrainerError(
                f"{self._url}: the server scored {len(positions)} tokens, but {len(ids)} were sent: does {self._name} use the tokenizer of teachers.model?"
            )
        return [{i: max(logp, LEAST) for i, logp in one.items()} for one in found]

    def _post(self, client: httpx.Client, body: Mapping[str, Any]) -> dict[str, Any]:
        failure = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                reply = client.post(f"{self._url}/completions", json=body)
            except (httpx.TransportError, httpx.InvalidURL) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if reply.status_code < 500 and reply.status_code != 429:
                break
            failure = f"status {reply.status_code}: {reply.text[:200]}"
        else:
            raise TrainerError(
                f"{self._url}: no answer from the teacher after {ATTEMPTS} tries ({failure})"
            )
        if not reply.is_success:
            raise TrainerError(
                f"{self._url}: the teacher's server refused the request ({reply.status_code}): {reply.text[:300]}"
            )
        try:
            return reply.json()
        except ValueError as error:
            raise TrainerError(
                f"{self._url}: the answer is not JSON: {reply.text[:200]}"
            ) from error


def load_teachers(
    config: RunConfig, reader: Renderer, device: torch.device | str
) -> list[FrozenTeacher]:
    """Load the teachers of a run: each one's tokenizer and, unless it is on a server, its weights.

    Args:
        config: settings that name the teachers.
        reader: renders the trainee's prompts.
        device: device for the weights.

    Raises:
        TrainerConfigError: a teacher can't be loaded, or shares no token with the trainee.
    """
    named = config.teachers or []
    told = [1.0 if one.accuracy is None else one.accuracy for one in named]
    return [
        _load(config, one, accuracy / sum(told), reader, device)
        for one, accuracy in zip(named, told, strict=True)
    ]


def _load(
    config: RunConfig,
    options: TeacherOptions,
    weight: float,
    reader: Renderer,
    device: torch.device | str,
) -> FrozenTeacher:
    source: dict[str, Any] = {
        "revision": options.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(options.model, **source)
    except (OSError, ValueError) as error:
        raise TrainerConfigError(
            f"teachers: model={options.model}: no tokenizer there ({error})"
        ) from error
    try:
        known = AutoConfig.from_pretrained(options.model, **source).get_text_config()
    except (OSError, ValueError):  # of a served one the tokenizer is enough
        known = None
    n_positions = getattr(known, "max_position_embeddings", None)
    is_tail = reader.window == "tail"
    renderer = Renderer(
        tokenizer=tokenizer,
        # What the trainee's budget left is shown whole; a tail is one of as many tokens here.
        max_prompt_tokens=reader.max_prompt_tokens if is_tail else 1 << 30,
        with_tools=reader.with_tools,
        window="tail",
    )
    alignment = TokenAlignment(mine=reader.tokenizer, theirs=tokenizer)
    if len(alignment.common) < 2:
        raise TrainerConfigError(
            f"teachers: model={options.model} shares no token with the trainee"
        )
    model, server = None, None
    if options.url is None:
        of_teacher = replace(
            config, model=options.model, model_revision=options.revision, quantize="none", peft=None
        )
        model = load_base(of_teacher).to(device).eval().requires_grad_(requires_grad=False)
    else:
        server = ScoringServer(options.url, options.name or options.model, top_k=options.top_k)
    return FrozenTeacher(
        name=options.name or options.model,
        weight=weight,
        alignment=alignment,
        renderer=renderer,
        reader=reader,
        n_positions=n_positions,
        model=model,
        server=server,
    )
