"""The vocabulary of the pipeline: all records that more than one room uses.

Read this file first. It imports none of our own modules.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

Message = dict[str, Any]
"""One chat message in OpenAI's form, with `role` and `content`. An assistant message may have
`tool_calls`, whose `function.arguments` is a JSON string. A tool result has `tool_call_id`."""

Tool = dict[str, Any]
"""One tool in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

AgreementLevel = Literal["exact", "effect", "target", "tool"]
"""How similar two actions are, from strict to loose."""

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

MIN_P_BETTER = 0.7
"""The least probability of being right of a pair. What teachers agree on with less is a lesson. See
`replay_pipeline.judge.belief` for how many of such pairs are right."""
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
"""Outcomes that show, in hindsight, that another action would probably have been better."""

REHEARSAL = "rehearsal"
"""Prefix of all made-up names of a rehearsal: models, teachers, and the source of a pair. Anything
with this prefix stays away from the Hub."""

TEST_FRACTION = 0.25
"""Default share of sessions that go to the test split, by hash."""


PAIR_LENGTHS = (8_192,)
"""Default lengths to which pairs are cut: tokens of the prompt, the tools, and the longer side."""


_FAMILIES = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))
_PART_OF_SESSION = re.compile(r"\.agent-.*|~[^~]*$", re.DOTALL)


def conversation_of(session_id: str) -> str:
    """Return the conversation of a session from its id alone.

    The ids of subagents, and of sessions in rewritten files, begin with the id of their session.

    >>> conversation_of("4f9d.agent-a1"), conversation_of("4f9d~03ab12"), conversation_of("4f9d")
    ('4f9d', '4f9d', '4f9d')
    """
    return _PART_OF_SESSION.sub("", session_id) or session_id


@lru_cache(maxsize=1_024)
def family_of_model(model: str | None) -> str | None:
    """Return the family of a model or vendor name in one spelling, or None without a name.

    Models of one vendor learn from the same data, so they share one vote.

    >>> family_of_model("claude-opus-4-5-20251101"), family_of_model("anthropic/claude-opus-4.7")
    ('anthropic', 'anthropic')
    """
    if not model:
        return None
    vendor, slash, name = model.lower().rpartition("/")
    for family, beginnings in _FAMILIES["models"].items():
        if name.startswith(tuple(beginnings)):
            return family
    vendor = vendor.split("/")[-1] if slash else name
    return _FAMILIES["spellings"].get(vendor, vendor)


class ClientTexts(TypedDict):
    """A client's own prompt and tools, which replace the beginning of a neutral prompt."""

    n_replaced: int
    """Number of leading messages of the neutral prompt that they replace."""
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
    """What went wrong at this step: the error text, or the user's feedback."""
    outcome: NotRequired[Outcome]
    error_kind: NotRequired[str | None]
    session_id: NotRequired[str]
    conversation: NotRequired[str | None]
    """The conversation that the session belongs to. Train and test never share one."""
    project: NotRequired[str | None]
    """The project folder of the session, or its hash."""
    turn_idx: NotRequired[int]
    cwd: NotRequired[str | None]
    """Working directory of the session at this step. Relative paths are read against it."""
    student_model: NotRequired[str | None]
    alternatives: NotRequired[list[Message]]
    """Other actions that were recorded at the same prefix (a rewound branch), newest last."""
    n_context_tokens: NotRequired[int | None]
    """Prompt tokens that the provider recorded for this step."""
    typed: NotRequired[list[str]]
    """What the person typed before this step. What clients, commands, and other agents put in the
    user's place is not among it; in a conversation of a subagent, nothing is."""
    fidelity: NotRequired[Literal["exact", "rebuilt"]]
    """`exact` if the log contains the sent request, with every message confirmed by its hash.
    `messages`, their roles, `system`, `tools`, and `params` are then those of the request."""
    system: NotRequired[list[str]]
    """The texts of the sent system prompt, if the log has it. `messages` then begins with these and
    not with a neutral prompt."""
    harness: NotRequired[dict[str, Any]]
    """The harness behind the system prompt and the tools, if they were recorded from the client:
    `agent`, `version`, `sha`, and a `note` on differences."""
    client_texts: NotRequired[ClientTexts]
    """The client's own texts, if the state was requested in the neutral form."""
    params: NotRequired[dict[str, Any]]
    """The other parameters of the request, if the log has it: model, thinking, context management, …"""


RESERVED_PARAMS = ("model", "messages", "tools", "stream", "n")
"""Fields of a request that a teacher's `params` can't set."""

PRICE_NAMES = (
    "prompt",
    "completion",
    "input_cache_read",
    "input_cache_write",
    "internal_reasoning",
    "request",
)
"""The fields of a price. The first two are required."""


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
    """Short name for its answers and reports."""
    model: Annotated[str, Field(min_length=1)]
    """The endpoint's id for the model, such as `deepseek/deepseek-v4-pro`."""
    answers_as: Annotated[str | None, Field(exclude_if=lambda name: name is None)] = None
    """The model's name in the endpoint's answers, if it differs from `model`, as with a deployment.
    `*` accepts any name. If the first answers come from another model, the teacher is stopped."""
    base_url: str = "https://openrouter.ai/api/v1"
    """Address of the endpoint, without `/chat/completions`. Requests are private, so plain
    `http://` is only allowed for this machine."""
    api_key_env: str | None = "OPENROUTER_API_KEY"
    """Environment variable with the key. Empty or `None` for an endpoint without keys."""
    params: dict[str, Any] = {}
    """Extra request fields, such as `{"temperature": 0.2, "max_completion_tokens": 2048}`. Fields
    that the program sets itself (`model`, `messages`, `tools`, `stream`, `n`) are refused."""
    price: dict[str, float] | None = None
    """US dollars per token under OpenRouter's names: `prompt`, `completion`, and, if they differ,
    `input_cache_read`, `input_cache_write`, and `internal_reasoning`. `request` is per call. With
    `None`, the price comes from the endpoint's `/models`. A run with a ceiling refuses a teacher
    without a price."""
    max_concurrency: Annotated[int, Field(ge=1)] = 32
    """Calls in flight at once to this teacher."""
    family: str | None = None
    """Model family for voting. By default, the family of `model`."""
    dialect: Literal[
        "auto", "openrouter", "openai", "azure", "vllm", "llama.cpp", "ollama", "transformers",
        "litellm",
    ] = "auto"  # fmt: skip
    """The kind of server at `base_url`. `auto` decides by the address."""
    is_distillable: bool | None = None
    """Whether the vendor's terms allow training on the answers. `None` if unknown."""
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
        """Return whether a program sets the address and the key together, which binds them to each other.

        A settings file binds nothing, since it may have come with a downloaded folder.
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
        """Return the family that shares one vote: that of `family`, or else of `model`."""
        return family_of_model(self.family or self.model) or self.name


SAMPLE_TEACHERS: tuple[TeacherSpec, ...] = (
    TeacherSpec(name="deepseek", model="deepseek/deepseek-v4-pro", is_distillable=True),
    TeacherSpec(name="qwen", model="qwen/qwen3-coder", is_distillable=True),
    TeacherSpec(name="glm", model="z-ai/glm-4.6", is_distillable=True),
)
"""The teachers with answers in the bundled sample, independent of the default teachers."""

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
"""Teachers that aren't models. Their answers are made up from the sessions."""


class RetryPolicy(BaseModel):
    """How often, and after how long, to retry a call that surely cost nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    max_attempts: Annotated[int, Field(ge=1)] = 6
    """The most times that a call is sent."""
    first_wait_s: Annotated[float, Field(ge=0)] = 0.5
    """Wait before the first retry, in seconds. It doubles with each retry."""
    max_wait_s: Annotated[float, Field(ge=0)] = 60.0
    """Longest wait, in seconds, unless the endpoint asks for a longer one."""
    longest_pause_s: Annotated[float, Field(ge=0)] = 600.0
    """If an endpoint asks for a longer pause, the run doesn't ask it again."""
    settle_s: Annotated[float, Field(ge=0)] = 60.0
    """Seconds that a run waits at its end for lost calls that may still be running, and after a
    stop for calls in flight. The next run asks the remaining questions again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookAnswer:
    """What a client would have answered to one call of a look."""

    text: str
    source: Literal["files", "log", "fixed", "command", "run", "unknown"]
    """Read from the files as they were, recorded for the same call, always the same, a look that ran on those
    files, what an action left behind there, or that nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A step at which a teacher only looked or kept its books, and what it was answered."""

    action: Message
    answers: tuple[LookAnswer, ...]
    """One for each call."""
    request_sha: str
    cost_usd: float = 0.0
    latency_s: float = 0.0
    n_prompt_tokens: int | None = None
    n_cached_tokens: int | None = None
    n_completion_tokens: int | None = None

    @property
    def is_known(self) -> bool:
        """Return whether each of its calls was answered as a client would have."""
        return all(answer.source != "unknown" for answer in self.answers)

    def messages(self) -> list[Message]:
        """Return what the step adds to a prompt: the action, and a result for each of its calls."""
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": answer.text}
            for call, answer in zip(self.action["tool_calls"], self.answers, strict=True)
        ]
        return [self.action, *results]


STILL_LOOKING = "still_looking"
"""The teacher looked as often as it may, or for as much as looks may cost, and did nothing yet."""
CANNOT_LOOK = "cannot_look"
"""Nobody can truly say what it would have seen, or it ended its turn when it was told so of a call."""
UNFINISHED = "unfinished"
"""It waits for the next run."""
ONLY_LOOKED = (STILL_LOOKING, CANNOT_LOOK, UNFINISHED)
"""What a teacher that did nothing yet has in the place of an error: its calls were answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherAction:
    """The action of one teacher at one state. A failed call is a row with `error_code`."""

    state_id: str
    teacher: str
    """`TeacherSpec.name`."""
    action: Message | None = None
    """The assistant message (`content`, `tool_calls`), or None if the call failed."""
    model: str | None = None
    """The endpoint's name for the model that answered."""
    family: str | None = None
    """Model family of the teacher. A family has one vote."""
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
    """Hash of the canonical request. Equal requests are paid once."""
    generation_id: str | None = None
    is_distillable: bool | None = None
    error_code: str | None = None
    error_message: str | None = None
    gate: str | None = None
    """The gate that drew this call by chance."""
    propensity: float = 1.0
    """Probability with which this call was made. Weight it by the inverse."""
    looks: tuple[Look, ...] = ()
    """What the teacher looked at before its action. Costs, tokens and time are those of all steps."""
    n_after: int | None = None
    """The how manyth step behind the teacher's vote it is; then `looks` are all steps before it."""

    @property
    def is_rehearsal(self) -> bool:
        """Return whether the answer was made up, according to its endpoint and not the teacher's name."""
        told = (self.model, self.provider, self.teacher, self.family)
        return any((name or "").lower().startswith(REHEARSAL) for name in told)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The result of executing an action on a copy of its state's files."""

    works: bool
    """Whether all its calls were carried out. Commands count with any exit status."""
    error_kind: str | None = None
    """How it failed, with the values of a state's `error_kind`."""
    effect: str | None = None
    """Hash of what it changed, and of the output and status of commands. Equal for actions with the
    same effect. None if nothing was changed or run."""
    is_passing: bool | None = None
    """Whether the project's check passes after it. None if it was not run."""
    was_passing: bool | None = None
    """Whether the check passed before it."""
    answer: str = ""
    """The answer of its last call, shortened and redacted."""
    diff: str = ""
    """The changes of the files, shortened and redacted."""

    @property
    def check(self) -> str | None:
        """Return the result of the project's check: `fixed`, `broken`, `passes`, `fails`, or None."""
        if self.is_passing is None:
            return None
        if self.is_passing == self.was_passing:
            return "passes" if self.is_passing else "fails"
        return "fixed" if self.is_passing else "broken"

    def in_words(self) -> str:
        """Return `works` (with the result of the check, if it was run), or `fails: ` with the reason."""
        if not self.works:
            return f"fails: {self.error_kind}"
        return f"works, check {self.check}" if self.check else "works"


class DPOPair(TypedDict):
    """A preference: at `state_messages`, the teachers' `chosen` beats the student's `rejected`.

    Both sides are canonical texts of an action, rendered by the same code.
    """

    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    n_teachers_agreeing: int
    pair_id: NotRequired[str]
    """Id of the pair, made from its state and sides. A state may have several pairs."""
    chosen_action: NotRequired[Message]
    """The chosen side as an assistant message in canonical form."""
    rejected_action: NotRequired[Message]
    session_id: NotRequired[str]
    conversation: NotRequired[str | None]
    cwd: NotRequired[str | None]
    """Folder against which relative paths of both sides are read."""
    tools: NotRequired[list[Tool]]
    teachers_agreeing: NotRequired[list[str]]
    n_teachers_asked: NotRequired[int]
    n_teachers_valid: NotRequired[int]
    n_looks: NotRequired[int]
    """How often a teacher that agrees looked before the chosen action, at the least. Its prompt lacks that."""
    agreement_level: NotRequired[AgreementLevel]
    margin: NotRequired[int]
    """Votes for the consensus minus votes for the strongest other action, including the student's."""
    n_against: NotRequired[int]
    """Votes for the student's action: the student's own, and those of families that agree with it."""
    evidence: NotRequired[list[str]]
    """Evidence for the chosen side from the record: `rewind`, `rejection`. `execution` means that
    the teachers' actions agree only in their effects when they were tried."""
    source: NotRequired[Literal["consensus", "rewind", "rejection", "rehearsal"]]
    rejected_source: NotRequired[Literal["recorded"]]
    hint: NotRequired[str | None]
    outcome: NotRequired[Outcome | None]
    student_model: NotRequired[str | None]
    shares_vendor: NotRequired[bool]
    """Whether an agreeing teacher comes from the student's own vendor."""
    is_distillable: NotRequired[bool | None]
    """Whether the terms of every agreeing teacher allow training on its answers."""
    control_mismatch: NotRequired[bool]
    """Whether the student's own model, asked again at this state, took another action."""
    cost_usd: NotRequired[float]
    """Cost of all answers at this state, in US dollars."""
    p_chosen_right: NotRequired[float]
    """Probability that the chosen side is a right action here."""
    p_rejected_wrong: NotRequired[float]
    """Probability that the rejected side is wrong, if the chosen side is right."""
    difference: NotRequired[list[str]]
    """What the sides differ in, as `replay_pipeline.actions.difference` names it, the largest last."""
    p_better: NotRequired[float]
    """Probability that the chosen side is right and the rejected side is wrong: the product of both."""
    chosen_trial: NotRequired[str]
    """Result of trying the chosen side: `works`, or `fails: ` with the reason."""
    rejected_trial: NotRequired[str]
    is_checked_right: NotRequired[bool]
    """Whether a check of the pair, by execution or by a person, found it right. Missing if it wasn't checked."""
    weight: NotRequired[float]
    """Weight of the pair in training, equal to `p_better`."""


class NormalizedDPOPair(DPOPair):
    """A `DPOPair` in chat form, with the statistics that the normalizer used."""

    chosen_messages: list[Message]
    rejected_messages: list[Message]
    stats: NotRequired[dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A step of progress in long work, for a bar, a log line, or an observation."""

    stage: str
    n_done: int
    n_total: int | None = None
    cost_usd: float | None = None
    part: str | None = None
    """The part of the stage that this counts, such as a batch. `None` means the whole stage."""
    unit: Literal["", "bytes"] = ""
    """The counted unit: bytes, or the items of the stage."""
    limit_usd: float | None = None
    """The ceiling on the money to spend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """The results and costs of one replay."""

    actions: list[TeacherAction] = field(repr=False)
    """One row per (state, teacher) that was decided in this run or before, including failures."""
    n_states: int
    n_sent: int
    """Calls that this run sent and decided."""
    n_cached: int
    """Calls that an answer in the ledger already decided."""
    spent_usd: float
    """Settled cost of all `actions`, whichever run paid for them: of a run beside this one too."""
    newly_spent_usd: float
    """Settled cost of the calls that this run sent, which is at most its ceiling."""
    max_total_usd: float
    """The ceiling of the run."""
    stop_reason: Literal["completed", "mostly_failed", "budget", "stopped", "teacher_stopped"]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of questions (state, teacher) that were not asked, by reason: `budget`, a gate, `teacher_stopped`."""
    cost_by_teacher_usd: dict[str, float] = field(default_factory=dict)
    doubted_teacher: str | None = None
    """The cheapest teacher, if it copies the agent, so that a second one was asked to confirm."""
    left: Mapping[str, Any] | None = None
    """What is left to ask, as `estimate` says it: calls, dollars, pairs, and positives. `None` if nothing is,
    or if no price is known."""
    forecast_usd: float | None = None
    """The prediction of `estimate` for this run before its first call."""
    n_open: int = 0
    """Failed calls that the next run repeats, because their reason may be temporary."""
    unknown_usd: float = 0.0
    """Money reserved for calls with an unknown outcome. It counts against the budget."""
    held_until: str | None = None
    """When the last of these calls has surely ended, so that a run can use their money (ISO 8601)."""
    coverage: dict[str, dict[str, int]] = field(default_factory=dict)
    """For `projects`, `sessions`, `kinds` of decision, and `states`: how many exist (`all`), and at
    how many a teacher was asked (`asked`)."""
    asked_by: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of states at which a teacher was asked, for each of the `projects` and `kinds`, zeros included."""
    stopped_teachers: dict[str, str] = field(default_factory=dict)
    """Why a teacher was stopped, by name."""
    n_disputed: int = 0
    """Calls whose reported cost wasn't believed. They are booked at the most that they should cost."""
    answered_by_others: dict[str, dict[str, int]] = field(default_factory=dict)
    """Answers of other models than the one that was asked, by teacher and model. They vote as their
    own family."""
