"""The vocabulary of the pipeline: every record that crosses a room.

Read this file first. Nothing here does I/O, or imports anything of ours but the families of models.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from replay_pipeline.families import family_of_model

Message = dict[str, Any]
"""One chat message in the OpenAI form: `role`, `content`, and for an assistant `tool_calls`, whose
`function.arguments` is a JSON string; for a tool result `tool_call_id`."""

Tool = dict[str, Any]
"""One tool in the OpenAI form: `{"type": "function", "function": {"name", "description",
"parameters"}}`."""

TokenLogprobs = list[list[tuple[str | list[int], float]]]
"""What a teacher's endpoint says of each token of an answer, in the order in which they were written:
the written token and then its likeliest alternatives, each with its natural log-probability. A token
is its text, or its bytes where these are not text by themselves."""

AgreementLevel = Literal["exact", "effect", "target", "tool"]
"""How strictly two actions are the same, from strict to loose."""

Outcome = Literal[
    "ok",
    "tool_error",
    "user_rejected",
    "denied_by_policy",
    "hook_blocked",
    "cancelled_sibling",
    "interrupted",
    "retracted",
    "rewound",
    "no_result",
    "final_text",
]
"""What became of a recorded action."""

FAILURES: frozenset[Outcome] = frozenset(
    (
        "tool_error",
        "user_rejected",
        "denied_by_policy",
        "hook_blocked",
        "interrupted",
        "retracted",
        "rewound",
    )
)
"""Outcomes in which hindsight says that another action would likely have been better."""

REHEARSAL = "rehearsal"
"""How everything that was made up for a rehearsal begins: models, teachers, the source of a pair.
What is so called is play, and is kept away from the Hub."""

TEST_FRACTION = 0.25
"""Share of sessions, by hash, that go to the test split unless somebody says otherwise."""

ExportFormat = Literal["trl", "llama-factory", "axolotl", "unsloth", "jsonl"]
"""Whose files pairs are written as: those of a trainer, or JSON lines in the OpenAI form."""

PAIR_LENGTHS = (8_192,)
"""Tokens of prompt, tools and the longer side to which pairs are cut unless somebody says otherwise."""


_PART_OF_SESSION = re.compile(r"\.agent-.*|~[^~]*$", re.DOTALL)


def conversation_of(session_id: str) -> str:
    """Return the conversation of a session of which nothing but its id is known.

    A subagent, and what was read of a file that was rewritten, bear the id of their session.

    >>> conversation_of("4f9d.agent-a1"), conversation_of("4f9d~03ab12"), conversation_of("4f9d")
    ('4f9d', '4f9d', '4f9d')
    """
    return _PART_OF_SESSION.sub("", session_id) or session_id


class ClientTexts(TypedDict):
    """A client's own prompt and tools, which replace the beginning of a neutral prompt."""

    n_replaced: int
    """How many messages of the neutral prompt they stand for, from the first."""
    messages: list[Message]
    tools: list[Tool]


class TraceState(TypedDict):
    """One decision point of a recorded agent session: the messages before it, and the action.

    `messages` ends with the last message *before* the action, so it never contains
    `student_action`.
    """

    state_id: str
    messages: list[Message]
    student_action: Message
    """The recorded assistant message (text and tool calls). A plain string is read as text."""
    tools: NotRequired[list[Tool]]
    hint: NotRequired[str | None]
    """What went wrong at this step, in words: the error text or the user's feedback."""
    outcome: NotRequired[Outcome]
    error_kind: NotRequired[str | None]
    session_id: NotRequired[str]
    conversation: NotRequired[str | None]
    """The conversation that the session is a part of: train and test never share one."""
    project: NotRequired[str | None]
    """The project folder of the session, or its hash."""
    turn_idx: NotRequired[int]
    cwd: NotRequired[str | None]
    """Working directory of the session at this step; relative paths are read against it."""
    student_model: NotRequired[str | None]
    alternatives: NotRequired[list[Message]]
    """Other actions recorded at the very same prefix (a rewound branch), newest last."""
    n_context_tokens: NotRequired[int | None]
    """Prompt tokens that the provider recorded for this step."""
    fidelity: NotRequired[Literal["exact", "rebuilt"]]
    """`exact` where the log holds the request as it was sent, each message met by its hash: `messages`,
    their roles, `system`, `tools` and `params` are then those of the request."""
    system: NotRequired[list[str]]
    """The texts of the system prompt as it was sent, where the log has it; `messages` begins with
    them. It has no neutral prompt in their place."""
    harness: NotRequired[dict[str, Any]]
    """Of which client's harness the system prompt and the tools are, where they were learned from the
    client: `agent`, `version`, `sha` and what is not quite as it was (`note`)."""
    client_texts: NotRequired[ClientTexts]
    """What the client's own prompt has in place of the neutral one, where a state was asked for in the
    neutral form."""
    params: NotRequired[dict[str, Any]]
    """The other parameters of the request, where it is logged: model, thinking, context management, …"""


RESERVED_PARAMS = ("model", "messages", "tools", "stream", "n")
"""Fields of a request that are no matter of a teacher's `params`."""

PRICE_NAMES = (
    "prompt",
    "completion",
    "input_cache_read",
    "input_cache_write",
    "internal_reasoning",
    "request",
)
"""What a price may name; the first two it must."""


# Strict, so that no other reader of the address finds another host in it.
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[\w.~!$&'()*+,;=:%/-]*)?"
)
LOOPBACK = re.compile(r"localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|\[::1\]")
"""Names and addresses of this machine."""


class TeacherSpec(BaseModel):
    """A teacher: a model behind an OpenAI-compatible endpoint, with its prices."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(min_length=1)]
    """Short name under which its answers are kept and reported."""
    model: Annotated[str, Field(min_length=1)]
    """Model id as the endpoint knows it, e.g. `deepseek/deepseek-v4-pro`."""
    answers_as: Annotated[str | None, Field(exclude_if=lambda name: name is None)] = None
    """What the endpoint calls the model in its answers, where that is another name than `model`, as of
    a deployment; `*` takes any. A teacher whose first answers are of another model is stopped."""
    base_url: str = "https://openrouter.ai/api/v1"
    """Address of the endpoint, up to and without `/chat/completions`. What is sent there is private:
    plain `http://` is for this machine only."""
    api_key_env: str | None = "OPENROUTER_API_KEY"
    """Environment variable that holds the key; empty or `None` for an endpoint without keys."""
    params: dict[str, Any] = {}
    """Extra request fields, e.g. `{"temperature": 0.2, "max_completion_tokens": 2048}`. What the
    program sets itself (`model`, `messages`, `tools`, `stream`, `n`) is refused."""
    price: dict[str, float] | None = None
    """US dollars per token under OpenRouter's own names: `prompt` and `completion`, and where they
    differ `input_cache_read`, `input_cache_write` and `internal_reasoning`; `request` is per call.
    `None`: taken from the endpoint's `/models`. A teacher without any price is refused under a
    dollar ceiling."""
    max_concurrency: Annotated[int, Field(ge=1)] = 32
    """Calls in flight at once to this teacher."""
    family: str | None = None
    """Model family for voting; by default that of `model`."""
    dialect: Literal[
        "auto", "openrouter", "openai", "azure", "anthropic", "vllm", "llama.cpp", "ollama",
        "transformers", "litellm",
    ] = "auto"  # fmt: skip
    """The kind of server at `base_url`; `auto` decides by its address."""
    is_distillable: bool | None = None
    """Whether the vendor's terms allow training on the answers; `None`: not known."""
    top_logprobs: Annotated[int, Field(ge=0, le=20, exclude_if=lambda n: n == 0)] = 0
    """Number of likeliest tokens to request at each token of an answer, with their
    log-probabilities; 0 requests none. The ledger keeps them with the answer. A run refuses
    endpoints that offer none."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of one call, in seconds after its last byte was sent. It is long on purpose,
    because you pay for an aborted call."""

    _names_its_key: bool = PrivateAttr(default=False)

    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            """Make a teacher in a program; what files say goes through `model_validate` instead."""
            super().__init__(**fields)
            self._names_its_key = bool(fields.get("api_key_env"))

        # Validation would call it for teachers in settings files, too, as it does with any other.
        __init__.__pydantic_base_init__ = True

    def __eq__(self, other: object) -> bool:
        """Return whether both say the same of a teacher, whoever says it."""
        return isinstance(other, TeacherSpec) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    @property
    def names_its_key(self) -> bool:
        """Return whether a program names address and key in one line, which binds them to each other.

        What a settings file says binds nothing: it may have come with a folder.
        """
        return self._names_its_key

    @field_validator("base_url")
    @classmethod
    def _is_private(cls, url: str) -> str:
        found = _ADDRESS.fullmatch(url)
        if found is None:
            raise ValueError(
                f"{url!r} is not an address: https://HOST[:PORT]/PATH, without a user, query or fragment"
            )
        if found["scheme"] == "http" and not LOOPBACK.fullmatch(found["host"]):
            raise ValueError(
                f"{url}: plain http is for this machine (127.0.0.1, localhost) only, because others could read prompts and keys on the way; use https, or a tunnel (ssh -L)"
            )
        return url

    @field_validator("params")
    @classmethod
    def _can_be_bounded(cls, params: dict[str, Any]) -> dict[str, Any]:
        if reserved := [name for name in params if name in RESERVED_PARAMS]:
            raise ValueError(
                f"{', '.join(reserved)}: the program sets this field itself; remove it from `params`"
            )
        for name in ("max_completion_tokens", "max_tokens"):
            limit = params.get(name, 1)
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ValueError(
                    f"{name}={limit!r} is not a whole number above 0, so a call would have no bound"
                )
        return params

    @field_validator("price", mode="before")
    @classmethod
    def _numbers(cls, price: Mapping[str, float | str] | None) -> dict[str, float] | None:
        if price is None:
            return None
        if unknown := [key for key in price if key not in PRICE_NAMES]:
            raise ValueError(
                f"unknown {', '.join(map(repr, unknown))}: the names are {', '.join(PRICE_NAMES)}"
            )
        if missing := [key for key in PRICE_NAMES[:2] if key not in price]:
            raise ValueError(f"{' and '.join(missing)} must be given; 0 is a price")
        numbers = {key: float(value) for key, value in price.items()}
        if any(not 0 <= value < float("inf") for value in numbers.values()):
            raise ValueError("a price must be a number of dollars per token, at least 0")
        return numbers

    @property
    def vendor(self) -> str:
        """Return the family that counts as one vote: of `family`, or else of `model`."""
        return family_of_model(self.family or self.model) or self.name


SAMPLE_TEACHERS: tuple[TeacherSpec, ...] = (
    TeacherSpec(name="deepseek", model="deepseek/deepseek-v4-pro", is_distillable=True),
    TeacherSpec(name="qwen", model="qwen/qwen3-coder", is_distillable=True),
    TeacherSpec(name="glm", model="z-ai/glm-4.6", is_distillable=True),
)
"""The teachers whose answers the bundled sample holds, whoever the default teachers are."""

REHEARSAL_TEACHERS: tuple[TeacherSpec, ...] = tuple(
    TeacherSpec(
        name=f"{REHEARSAL}-{name}",
        model=f"{REHEARSAL}/{name}",
        family=f"{REHEARSAL}-{name}",
        api_key_env=None,
        dialect="openrouter",
    )
    for name in ("one", "two", "three")
)
"""Teachers that are no models: their answers are made up from the sessions themselves."""


class RetryPolicy(BaseModel):
    """How often, and after how long, a call that surely cost nothing is retried."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_attempts: Annotated[int, Field(ge=1)] = 6
    """Times a call is sent at most."""
    first_wait_s: Annotated[float, Field(ge=0)] = 0.5
    """Wait before the second time, in seconds; it doubles from time to time."""
    max_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest wait, in seconds, unless the endpoint asks for a longer one."""
    longest_pause_s: Annotated[float, Field(ge=0)] = 600.0
    """An endpoint that asks for a longer pause is left alone for the rest of the run."""
    settle_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a run waits at its end for lost calls that may still be running, in seconds, and how
    long calls in flight are awaited after a stop. What is left then is asked again by the next run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherAction:
    """The action of one teacher at one state. A failed call is a row with `error_code`."""

    state_id: str
    teacher: str
    """`TeacherSpec.name`."""
    action: Message | None = None
    """The assistant message (`content`, `tool_calls`), or `None` when the call failed."""
    model: str | None = None
    """The model that answered, as the endpoint names it."""
    family: str | None = None
    """Model family of the teacher: one family is one vote."""
    provider: str | None = None
    finish_reason: str | None = None
    latency_s: float = 0.0
    cost_usd: float = 0.0
    n_prompt_tokens: int | None = None
    n_completion_tokens: int | None = None
    n_cached_tokens: int | None = None
    n_reasoning_tokens: int | None = None
    n_attempts: int = 1
    request_sha: str | None = None
    """Hash of the canonical request: equal requests are paid once."""
    generation_id: str | None = None
    is_distillable: bool | None = None
    error_code: str | None = None
    error_message: str | None = None
    gate: str | None = None
    """The gate, a preset of the buying policy, that decided by chance that this call is made."""
    propensity: float = 1.0
    """With which probability this call was made; weigh by its inverse."""
    logprobs: TokenLogprobs | None = field(default=None, repr=False)
    """Token probabilities, where `TeacherSpec.top_logprobs` asked for them and they came."""

    @property
    def is_rehearsal(self) -> bool:
        """Return whether the answer was made up: its endpoint says so, whatever the teacher is called."""
        told = (self.model, self.provider, self.teacher, self.family)
        return any((name or "").lower().startswith(REHEARSAL) for name in told)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The result of an action that was executed on a copy of the files of its state."""

    works: bool
    """Whether every call of it was carried out; a command may have ended with any status."""
    error_kind: str | None = None
    """How it failed, as `error_kind` of a state."""
    effect: str | None = None
    """Names what it changed, and of commands also output and status: equal for actions with one
    and the same effect. None where nothing was changed or run."""
    was_run: bool = False
    """Whether a command was run, instead of file tools alone."""
    is_passing: bool | None = None
    """Whether the project's check passes after it; None where it was not run."""
    was_passing: bool | None = None
    """Whether the check passed before it."""
    answer: str = ""
    """What its last call answered, shortened and redacted."""
    diff: str = ""
    """How the files differ afterwards, shortened and redacted."""

    @property
    def check(self) -> str | None:
        """Return what became of the project's check: `fixed`, `broken`, `passes`, `fails` or None."""
        if self.is_passing is None:
            return None
        if self.is_passing == self.was_passing:
            return "passes" if self.is_passing else "fails"
        return "fixed" if self.is_passing else "broken"

    def in_words(self) -> str:
        """Return `works`, with the check where it was run, or `fails: ` and the reason."""
        if not self.works:
            return f"fails: {self.error_kind}"
        return f"works, check {self.check}" if self.check else "works"


class DPOPair(TypedDict):
    """A preference: at `state_messages`, the teachers' `chosen` beats the student's `rejected`.

    Both sides are the canonical text of an action, rendered by the same code.
    """

    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    n_teachers_agreeing: int
    pair_id: NotRequired[str]
    """Names the pair by its state and sides; a state may have several pairs."""
    chosen_action: NotRequired[Message]
    """The chosen side as an assistant message in canonical form."""
    rejected_action: NotRequired[Message]
    session_id: NotRequired[str]
    conversation: NotRequired[str | None]
    cwd: NotRequired[str | None]
    """Folder that relative paths of both sides are read against."""
    tools: NotRequired[list[Tool]]
    teachers_agreeing: NotRequired[list[str]]
    n_teachers_asked: NotRequired[int]
    n_teachers_valid: NotRequired[int]
    agreement_level: NotRequired[AgreementLevel]
    margin: NotRequired[int]
    """Votes of the consensus minus votes of the strongest other side, the student's included."""
    n_against: NotRequired[int]
    """Votes for the student's action: the student, and every family that sides with it."""
    evidence: NotRequired[list[str]]
    """What the record itself says for the chosen side: `rewind`, `rejection`. `execution`: the teachers agree
    only by what their actions did when they were tried."""
    source: NotRequired[Literal["consensus", "rewind", "rejection", "rehearsal"]]
    rejected_source: NotRequired[Literal["recorded", "sampled"]]
    hint: NotRequired[str | None]
    outcome: NotRequired[Outcome | None]
    student_model: NotRequired[str | None]
    shares_vendor: NotRequired[bool]
    """Whether an agreeing teacher comes from the student's own vendor."""
    is_distillable: NotRequired[bool | None]
    """Whether the terms of every agreeing teacher allow training on its answers."""
    control_mismatch: NotRequired[bool]
    """Whether the student's own model, asked again at this state, left its recorded action."""
    cost_usd: NotRequired[float]
    """What all answers at this state cost, in US dollars."""
    p_chosen_right: NotRequired[float]
    """Probability that the chosen side is a right action here, as votes and record tell."""
    p_better: NotRequired[float]
    """Probability that the chosen side is right and the rejected one is not."""
    chosen_trial: NotRequired[str]
    """What became of the chosen side where it was tried: `works`, or `fails: ` and how."""
    rejected_trial: NotRequired[str]
    is_checked_right: NotRequired[bool]
    """What was found when the pair was checked, by execution or by a person; missing where nobody did."""
    weight: NotRequired[float]
    """How much the pair should count in training: `p_better`."""


class NormalizedDPOPair(DPOPair):
    """A `DPOPair` in chat form, with the statistics that the normalizer judged it by."""

    chosen_messages: list[Message]
    rejected_messages: list[Message]
    stats: NotRequired[dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A step forward in long work, for a bar, a log line or an observation."""

    stage: str
    n_done: int
    n_total: int | None = None
    cost_usd: float | None = None
    part: str | None = None
    """What of the stage this counts, such as a batch; `None`: all of it."""
    unit: Literal["", "bytes"] = ""
    """What is counted: bytes, or whatever the stage works through."""
    limit_usd: float | None = None
    """What may be spent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """The savings of one gate, and its losses where they could be measured."""

    gate: str
    n_calls_saved: int = 0
    saved_usd: float = 0.0
    """Expected cost of the calls that were not made."""
    n_explored: int = 0
    """Calls made by chance although the gate would have saved them."""
    n_pairs: int | None = None
    """Pairs that asking everyone brings; known only when measured on recorded answers."""
    n_pairs_lost: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """The results and costs of one replay."""

    actions: list[TeacherAction] = field(repr=False)
    """One row per (state, teacher) that was decided now or before, failed ones included."""
    n_states: int
    n_sent: int
    """Calls decided by sending a request in this run."""
    n_cached: int
    """Calls decided by an answer that was already in the ledger."""
    spent_usd: float
    """Settled cost of `actions`, whenever it was paid."""
    newly_spent_usd: float
    """Settled cost of what this run sent."""
    max_total_usd: float
    """The ceiling that was set."""
    stop_reason: Literal["completed", "budget", "stopped", "teacher_stopped"]
    skipped: dict[str, int] = field(default_factory=dict)
    """(state, teacher) questions that were not asked, by reason: `budget`, a gate, `teacher_stopped`."""
    cost_by_teacher_usd: dict[str, float] = field(default_factory=dict)
    forecast_usd: float | None = None
    """What `estimate` predicted for this run before the first call."""
    n_open: int = 0
    """Failed calls that the next run asks again: their reason need not last."""
    unknown_usd: float = 0.0
    """Reserved for calls of this run whose outcome is not known; it counts against the budget."""
    held_until: str | None = None
    """When the last of these is surely over, so that a run can go on with their money (ISO 8601)."""
    gates: tuple[GateReport, ...] = ()
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of `projects`, `sessions`, `kinds` of decision and `states`: how many there are (`all`), and at
    how many somebody was asked (`asked`)."""
    asked_by: dict[str, dict[str, int]] = field(default_factory=dict)
    """States at which somebody was asked, by name of each of the `projects` and `kinds`; 0 where nobody
    was."""
    n_overruns: int = 0
    """Calls that cost more than could be expected at most; booked as they are."""
    stopped_teachers: dict[str, str] = field(default_factory=dict)
    """Why teachers were not asked any more, by name."""
    n_disputed: int = 0
    """Calls whose reported cost was not believed; booked at the most they should cost."""
