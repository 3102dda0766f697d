"""The dataset card, generated from the manifests of the batches that the dataset holds."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import pyarrow as pa
import pyarrow.compute
import yaml

from replay_pipeline.publish import layout
from replay_pipeline.publish.splits import SPLITS, session_sha
from replay_pipeline.redaction.printable import printable

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
_LICENSE_NAME = "mixed-model-outputs"
_SIZES = [(1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M")]
_COUNTED = ("agreement_level", "outcome", "source", "student_model")
_MAX_SAMPLE_CHARS = 1200


class TeacherFacts(TypedDict, total=False):
    """What the card says about a teacher."""

    name: str
    model: str
    first_answer: str
    """Date of its first answer in the dataset, e.g. `2026-11-01`."""
    last_answer: str
    is_distillable: bool | None
    """Whether its vendor's terms allow training on its answers; `None`: not known."""


class CardFacts(TypedDict, total=False):
    """What only the caller knows; everything is optional, other keys are ignored."""

    title: str
    license: str
    """An identifier of the Hub; without it `other`, and the terms are described."""
    teachers: Sequence[TeacherFacts]
    accepted_terms: Sequence[str]
    """Models used although their vendor forbids training on answers."""
    control_run: Mapping[str, Any]
    """What the students' own models did when they were asked again, by name."""
    notes: str
    url: str
    """Where the software or the project is described."""
    ingest: Mapping[str, Mapping[str, Any]]
    """Reports of a stage by batch, as the pipeline's receipts hold them."""
    replay: Mapping[str, Mapping[str, Any]]
    pairs: Mapping[str, Mapping[str, Any]]
    normalize: Mapping[str, Mapping[str, Any]]


_GENERAL = ("title", "license", "teachers", "accepted_terms", "control_run", "notes", "url")
_OF_STAGES = {
    "ingest": ("n_sessions", "n_turns", "n_states"),
    "replay": ("n_answers", "n_failed", "spent_usd", "cost_by_teacher_usd", "errors"),
    "pairs": ("n_consensus", "n_agreement", "n_pairs", "outcomes"),
    "normalize": ("recipe", "n_in", "n_kept", "dropped", "length_bias"),
}


def general_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that hold for the whole dataset."""
    return {name: facts[name] for name in _GENERAL if name in facts}


def stage_facts(facts: Mapping[str, Any], batch: str) -> dict[str, Any]:
    """What the stages reported about a batch, as far as it does not change when they run again."""
    stages = {}
    for stage, names in _OF_STAGES.items():
        report = facts.get(stage, {}).get(batch)
        if report:
            stages[stage] = {name: report[name] for name in names if name in report}
    return stages


@dataclass(frozen=True, slots=True)
class Retracted:
    """Sessions (by hash) and batches that are not to come back."""

    sessions: frozenset[str] = frozenset()
    batches: frozenset[str] = frozenset()

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Retracted":
        """What the dataset's facts say."""
        noted = facts.get("retracted", {})
        return cls(frozenset(noted.get("sessions", ())), frozenset(noted.get("batches", ())))

    def facts(self) -> dict[str, Any]:
        """The same as facts."""
        return {"retracted": {"sessions": sorted(self.sessions), "batches": sorted(self.batches)}}

    def without(self, table: pa.Table) -> pa.Table:
        """The rows of a table that may stay."""
        if not self.sessions:
            return table
        pairs = zip(table["session_id"].to_pylist(), table["state_id"].to_pylist(), strict=True)
        stays = [session_sha(session or state) not in self.sessions for session, state in pairs]
        return table.filter(pa.array(stays, pa.bool_()))


def merge_facts(there: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """New facts over those that are there; what was retracted stays so."""
    one, other = Retracted.of(there), Retracted.of(new)
    both = Retracted(one.sessions | other.sessions, one.batches | other.batches)
    merged = {**there, **new}
    return {**merged, **both.facts()} if both != Retracted() else merged


def manifest_of(
    batch: str,
    *,
    files: Mapping[str, Mapping[str, Mapping[str, int]]],
    pairs: pa.Table,
    n_positives: int,
    sessions: Mapping[str, Sequence[str]],
    test_fraction: float,
    pins: Mapping[str, str],
    stages: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts of one batch: its files with their rows, and sums that add up over batches."""
    texts = {side: pc.list_flatten(pairs[side]) for side in ("chosen", "rejected")}
    return {
        "trace_batch": batch,
        "test_fraction": test_fraction,
        "pins": dict(sorted(pins.items())),
        "files": files,
        "sessions": sessions,
        "counts": {name: _counts(pairs[name].to_pylist()) for name in _COUNTED},
        "teachers_agreeing": _counts(pc.list_flatten(pairs["teachers_agreeing"]).to_pylist()),
        "n_pairs": len(pairs),
        "n_positives": n_positives,
        "n_distillable": pc.sum(pairs["is_distillable"]).as_py() or 0,
        "n_sharing_vendor": pc.sum(pairs["shares_vendor"]).as_py() or 0,
        "n_hints": len(pairs) - pairs["hint"].null_count,
        "n_bytes": {
            side: pc.sum(pc.binary_length(text)).as_py() or 0 for side, text in texts.items()
        },
        "stages": stages,
        "sample": _sample(pairs),
    }


def _sample(pairs: pa.Table) -> dict[str, Any] | None:
    if not len(pairs):
        return None
    first = pc.index(pairs["state_id"], pc.min(pairs["state_id"])).as_py()  # in any row order
    row = pairs.slice(first, 1).to_pylist()[0]
    return {name: row[name][-1] for name in ("prompt", "chosen", "rejected") if row[name]}


def _counts(values: Sequence[Any]) -> dict[str, int]:
    return dict(sorted(Counter("none" if v is None else str(v) for v in values).items()))


def encode(facts: Any) -> bytes:
    """Facts as the bytes of a JSON file; equal facts give equal bytes."""
    return (json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def digest_of(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """A name for the whole content of the dataset."""
    return hashlib.sha256(encode(manifests)).hexdigest()[:12]


def sessions_of(manifest: Mapping[str, Any]) -> list[str]:
    """Hashes of the sessions of a batch."""
    return [sha for side in SPLITS for sha in manifest["sessions"][side]]


def rows_by_split(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Rows of each config and split, over all batches."""
    return {
        config: {
            split: sum(
                sum(manifest["files"].get(config, {}).get(split, {}).values())
                for manifest in manifests.values()
            )
            for split in SPLITS
        }
        for config in layout.CONFIGS
    }


def render(manifests: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> bytes:
    """The whole card: metadata for the Hub, then what a reader wants to know."""
    ordered = [manifests[key] for key in sorted(manifests)]
    rows = {
        config: {split: count for split, count in counts.items() if count}
        for config, counts in rows_by_split(manifests).items()
        if any(counts.values())
    }
    described = _metadata(rows, facts, content=digest_of(manifests))
    metadata = yaml.safe_dump(described, sort_keys=False, allow_unicode=True)
    sections = [
        _summary(ordered, rows, facts),
        _loading(rows),
        _columns(),
        _agreement(ordered),
        _teachers(ordered, facts),
        _making(ordered),
        _control(facts),
        _terms(ordered, facts),
        _limits(ordered),
        _sample_row(ordered),
        _citation(facts, digest_of(manifests)),
    ]
    body = "\n\n".join(section for section in sections if section)
    return f"---\n{metadata}---\n\n{body}\n".encode()


def _metadata(
    rows: Mapping[str, Mapping[str, int]], facts: Mapping[str, Any], *, content: str
) -> dict[str, Any]:
    n_rows = sum(rows.get("pairs", {}).values())
    license_ = facts.get("license", "other")
    named = {"license_name": _LICENSE_NAME} if license_ == "other" else {}
    return {
        "pretty_name": _title(facts),
        "license": license_,
        **named,
        "task_categories": ["text-generation"],
        "tags": ["preference", "dpo", "trl", "tool-use", "agent", "synthetic", "replay-pipeline"],
        "size_categories": [next((name for size, name in _SIZES if n_rows < size), "1M<n<10M")],
        "configs": [
            {
                "config_name": config,
                # `datasets` names its cache of a local folder by these configs alone, not by the
                # files: without this line it would go on serving the rows of an older publication.
                "description": f"content {content}",
                **({"default": True} if config == "pairs" else {}),
                "data_files": [
                    {"split": split, "path": f"{layout.DATA}/{config}/{split}/**/*.parquet"}
                    for split in splits
                ],
            }
            for config, splits in rows.items()
        ],
        "dataset_info": [
            {"config_name": config, "features": layout.features_of(layout.CONFIGS[config])}
            for config in rows
        ],
    }


def _title(facts: Mapping[str, Any]) -> str:
    return facts.get("title", "Agent preference pairs")


_ABOUT = {
    "pairs": "states with a chosen and a rejected action",
    "positives": "states at which the student did what the teachers would",
    "prompts": "every state with a consensus, for policy optimization with a verifiable reward",
    "pairs_distillable": "the pairs whose teachers all allow training on their answers",
}


def _summary(
    ordered: Sequence[Mapping[str, Any]],
    rows: Mapping[str, Mapping[str, int]],
    facts: Mapping[str, Any],
) -> str:
    n_sessions = len({sha for manifest in ordered for sha in sessions_of(manifest)})
    table = _table(
        ("config", "what a row is", *SPLITS),
        [
            (f"`{config}`", _ABOUT[config], *(counts.get(split, 0) for split in SPLITS))
            for config, counts in rows.items()
        ],
    )
    notes = f"\n\n{facts['notes']}" if facts.get("notes") else ""
    return (
        f"# {_title(facts)}\n\n"
        "Preferences between actions of coding agents. Every row is a state of a recorded session: "
        "what the agent had seen at that point. The *rejected* action is what the agent did there; "
        "the *chosen* one is what teacher models agreed on when they were asked at the very same "
        "state. Both sides are messages in one canonical form, so that a model cannot tell them "
        f"apart by format.\n\n{_amount(n_sessions, 'session')} in "
        f"{_amount(len(ordered), 'trace batch', 'trace batches')}. Train and test never share a "
        f"session.\n\n{table}{notes}"
    )


def _loading(rows: Mapping[str, Mapping[str, int]]) -> str:
    others = [config for config in rows if config != "pairs"]
    more = f'\nother = load_dataset(path, "{others[0]}")  # a config by name' if others else ""
    return (
        "## Load it\n\n```python\nfrom datasets import load_dataset\n\n"
        'path = "owner/name"  # or this folder\n'
        f"pairs = load_dataset(path){more}\n```\n\n"
        "`pairs` goes into TRL's `DPOTrainer` as it is (conversational preference with tools); so "
        "do `positives` and `pairs` into `KTOTrainer`, and `prompts` into `GRPOTrainer`. Streaming "
        "works. In the files, messages and tools are JSON texts; `datasets` (5 or newer) gives "
        "them back as the messages they were."
    )


_COLUMN_NOTES = {
    "prompt": "messages up to the decision, tool calls and results included",
    "chosen": "the action of the teachers' consensus, one assistant message",
    "rejected": "the recorded action of the student, one assistant message",
    "completion": "the recorded action, with which the teachers agree (`positives`)",
    "label": "always true (`positives`)",
    "consensus": "the action of the consensus, as a message (`prompts`)",
    "kind": "`pair` or `agreement`: whether the student did otherwise (`prompts`)",
    "tools": "the tools that were offered, in the OpenAI form; null where none were",
    "state_id": "stable id of the state",
    "session_id": "the session; splits never cut one",
    "trace_batch": "the batch it came with; a batch is replaced as a whole",
    "hint": "what went wrong at this step: the error text or the user's feedback",
    "agreement_level": "how strictly the teachers agree: `exact`, `effect`, `target`, `tool`",
    "n_teachers_agreeing": "votes of the consensus, one per model family",
    "n_teachers_asked": "teachers that were asked",
    "n_teachers_valid": "teachers that answered with an action",
    "teachers_agreeing": "names of the teachers of the consensus",
    "margin": "votes of the consensus minus votes of the next group",
    "source": "`consensus`, `rewind` (the session itself went back) or `rejection` (by the user)",
    "rejected_source": "`recorded` or `sampled`",
    "outcome": "what became of the recorded action",
    "student_model": "the model that acted in the session",
    "shares_vendor": "whether an agreeing teacher is of the student's vendor",
    "is_distillable": "whether the terms of every agreeing teacher allow training on its answers",
    "cost_usd": "what the answers at this state cost, in US dollars",
    "weight": "suggested weight in a loss",
}


def _columns() -> str:
    return "## Columns\n\n" + _table(
        ("column", "meaning"), [(f"`{name}`", note) for name, note in _COLUMN_NOTES.items()]
    )


def _agreement(ordered: Sequence[Mapping[str, Any]]) -> str:
    n_pairs = sum(manifest["n_pairs"] for manifest in ordered)
    if not n_pairs:
        return ""
    parts = []
    titles = {
        "agreement_level": "agreement",
        "outcome": "recorded outcome",
        "source": "source",
        "student_model": "student",
    }
    for name, title in titles.items():
        counts = _added(manifest["counts"][name] for manifest in ordered)
        rows = [(_code(value), n, _percent(n, n_pairs)) for value, n in _by_size(counts)]
        parts.append(_table((title, "pairs", "share"), rows))
    n_shared = sum(manifest["n_sharing_vendor"] for manifest in ordered)
    n_hints = sum(manifest["n_hints"] for manifest in ordered)
    parts.append(
        f"{_percent(n_hints, n_pairs)} of the pairs carry a hint. In {_percent(n_shared, n_pairs)} "
        "an agreeing teacher comes from the student's own vendor."
    )
    return "## Agreement\n\n" + "\n\n".join(parts)


def _teachers(ordered: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    votes = _added(manifest["teachers_agreeing"] for manifest in ordered)
    costs = _added(_stage(m, "replay").get("cost_by_teacher_usd", {}) for m in ordered)
    told = {teacher["name"]: teacher for teacher in facts.get("teachers", ()) if "name" in teacher}
    names = sorted({*votes, *costs, *told})
    if not names:
        return ""
    allows = {True: "yes", False: "no"}
    columns = {
        "teacher": [_code(name) for name in names],
        "model": [_code(told.get(name, {}).get("model", "")) for name in names],
        "votes in pairs": [votes.get(name, 0) for name in names],
        "cost, USD": [f"{costs[name]:.4f}" if name in costs else "" for name in names],
        "asked": [_period(told.get(name, {})) for name in names],
        "allows distillation": [
            allows.get(told.get(name, {}).get("is_distillable"), "not known") for name in names
        ],
    }
    known = {head: values for head, values in columns.items() if any(v != "" for v in values)}
    return "## Teachers\n\n" + _table(list(known), zip(*known.values(), strict=True))


def _period(teacher: Mapping[str, Any]) -> str:
    dates = [teacher[key] for key in ("first_answer", "last_answer") if teacher.get(key)]
    return " to ".join(dict.fromkeys(dates))


def _making(ordered: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "Sessions are read into states, each state is replayed to the teachers under a hard dollar "
        "budget, and where enough model families agree on an action that the student did not take, "
        "a pair is born. Pairs are normalized with data-juicer recipes; both sides pass every "
        "filter. Secrets and personal data are replaced at ingestion, and every file is scanned "
        "again before it is published."
    ]
    figures = [
        ("states of recorded sessions", _sum(ordered, "ingest", "n_states")),
        ("answers of teachers", _sum(ordered, "replay", "n_answers")),
        ("failed calls", _sum(ordered, "replay", "n_failed")),
        ("US dollars spent on answers", _sum(ordered, "replay", "spent_usd")),
        ("states with a consensus", _sum(ordered, "pairs", "n_consensus")),
        ("of these, the student agreed", _sum(ordered, "pairs", "n_agreement")),
        ("pairs before normalization", _sum(ordered, "normalize", "n_in")),
        ("pairs kept", _sum(ordered, "normalize", "n_kept")),
    ]
    rows = [
        (what, f"{n:.4f}" if isinstance(n, float) else n) for what, n in figures if n is not None
    ]
    if rows:
        lines.append(_table(("step", "count"), rows))
    dropped = _added(_stage(manifest, "normalize").get("dropped", {}) for manifest in ordered)
    recipes = sorted({_stage(m, "normalize").get("recipe", "") for m in ordered} - {""})
    if recipes:
        named = ", ".join(map(_code, recipes))
        lines.append(f"Recipe: {named}." + ("" if dropped else " It dropped nothing."))
    if dropped:
        lines.append(
            _table(("dropped by", "pairs"), [(_code(name), n) for name, n in _by_size(dropped)])
        )
    return "## How it was made\n\n" + "\n\n".join(lines)


def _control(facts: Mapping[str, Any]) -> str:
    results = facts.get("control_run")
    if not results:
        return ""
    return (
        "## Control run\n\nA replay does not rebuild the harness that the student worked in. So the "
        "students' own models were asked again at a sample of states: `left` is the share of their "
        "answers that left their own recorded action. The higher it is, the less a teacher's "
        "disagreement says about the student.\n\n"
        + _table(("measure", "value"), [(_code(name), value) for name, value in results.items()])
    )


def _terms(ordered: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    n_pairs = sum(manifest["n_pairs"] for manifest in ordered)
    n_free = sum(manifest["n_distillable"] for manifest in ordered)
    lines = [
        "Chosen actions are outputs of the teachers named above, rejected ones of the student "
        "model. Some vendors forbid training competing models on outputs of theirs; whether that "
        "concerns you depends on their terms at the date of the answers and on what you train. "
        f"`is_distillable` says it row by row: true for {n_free} of {n_pairs} pairs, which are the "
        "config `pairs_distillable`. This is no legal advice."
    ]
    if accepted := facts.get("accepted_terms"):
        models = ", ".join(map(_code, accepted))
        lines.append(
            f"The publisher used {models} knowing that the vendor's terms restrict training on "
            "answers."
        )
    return "## Licence and terms\n\n" + "\n\n".join(lines)


def _limits(ordered: Sequence[Mapping[str, Any]]) -> str:
    n_bytes = _added(manifest["n_bytes"] for manifest in ordered)
    n_pairs = max(sum(manifest["n_pairs"] for manifest in ordered), 1)
    chosen, rejected = (round(n_bytes.get(side, 0) / n_pairs) for side in ("chosen", "rejected"))
    return (
        "## Limits\n\n"
        "- Agreement of teachers is not correctness: nobody executed the chosen actions.\n"
        "- The rejected side is the recorded action of another model, so it is off-policy for the "
        "model you train.\n"
        "- States come from the sessions of few people and projects; redaction replaces names and "
        "secrets by placeholders, which models can learn to write.\n"
        f"- Mean size of a side in bytes: chosen {chosen}, rejected {rejected}. Watch out for a "
        "length bias when these are far apart."
    )


def _sample_row(ordered: Sequence[Mapping[str, Any]]) -> str:
    sample = next((m["sample"] for m in ordered if m["sample"]), None)
    if not sample:
        return ""
    shown = {
        "prompt, last message": sample.get("prompt"),
        "chosen": sample.get("chosen"),
        "rejected": sample.get("rejected"),
    }
    parts = [f"{name}:\n\n~~~json\n{_indented(text)}\n~~~" for name, text in shown.items() if text]
    return "## A row\n\n" + "\n\n".join(parts)


def _indented(message: str) -> str:
    text = printable(json.dumps(json.loads(message), indent=2, ensure_ascii=False))
    text = text.replace("~~~", "~ ~ ~")
    return text if len(text) <= _MAX_SAMPLE_CHARS else f"{text[:_MAX_SAMPLE_CHARS]} …"


def _citation(facts: Mapping[str, Any], digest: str) -> str:
    url = f"  howpublished = {{\\url{{{facts['url']}}}}},\n" if facts.get("url") else ""
    return (
        "## Cite it\n\n"
        f"Name the version you used: this one is `data-{digest}`, which is also a tag of the "
        "repository.\n\n"
        f"```bibtex\n@misc{{agent_preference_pairs_{digest},\n  title = {{{_title(facts)}}},\n{url}"
        f"  note = {{Version data-{digest}, made with replay-pipeline}}\n}}\n```"
    )


def _stage(manifest: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
    return manifest["stages"].get(stage, {})


def _sum(ordered: Iterable[Mapping[str, Any]], stage: str, name: str) -> float | None:
    values = [_stage(manifest, stage).get(name) for manifest in ordered]
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _added(counts: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _by_size(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _amount(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _code(text: str) -> str:
    """A name that somebody else chose, as code: nothing in it is taken for Markdown or HTML."""
    shown = " ".join(printable(text).replace("`", "'").split())
    return f"`{shown}`" if shown else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
