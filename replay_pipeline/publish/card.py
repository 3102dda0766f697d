"""Write the dataset card from the manifests of the dataset's batches.

The text is in `card.md.jinja`, and this module computes its figures. All foreign text (names of
models and teachers, texts of sessions) is made inert first.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from replay_pipeline.judge.precision import PrecisionEvidence
from replay_pipeline.judge.strengths import strengths
from replay_pipeline.publish import layout
from replay_pipeline.publish.batch_facts import (
    content_digest,
    rows_by_split,
    session_hashes,
)
from replay_pipeline.publish.blind import in_words
from replay_pipeline.publish.splits import SPLITS
from replay_pipeline.redaction.printable import printable
from replay_pipeline.storage.schemas import describe

# Filled in directly: `DatasetCard.from_template` would compile it and read the result back each
# time, and publishers that meet on the Hub make the card again at every try.
_TEMPLATE = Template(Path(__file__).with_name("card.md.jinja").read_text("utf-8"))
# The declarations of messages are a thousand nodes: without libyaml they take most of the card's time.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_NO_WRAP = 1_000_000
_TITLE = "Agent preference pairs"
_LICENSE_NAME = "mixed-model-outputs"
_SIZES = [(1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M")]
_MAX_SAMPLE_CHARS = 1200
_ABOUT = {
    "pairs": "states with a chosen and a rejected action",
    "positives": "lessons: states with the action that the teachers agree on, where the agent took it or may be right too",
    "answers": "what one teacher said and nobody confirmed, to be imitated at its `p_chosen_right`; steps that a teacher took behind its vote have none",
    "prompts": "every state with a consensus, for policy optimization with a verifiable reward",
    "pairs_distillable": "the pairs whose teachers all allow training on their answers",
}
_COLUMNS = {
    "prompt": "Messages up to the decision, tool calls and results included.",
    "chosen": "The action of the teachers' consensus, one assistant message.",
    "rejected": "The recorded action of the agent, one assistant message.",
    "completion": "The action that the teachers agree on (`positives`), or that one said (`answers`).",
    "label": "Always true.",
    "consensus": "The action of the consensus, as a message (`prompts`).",
    "kind": "`agreement` if the agent took the action of the consensus, `lesson` if it took another one that may be right too, `pair` if it was likely wrong; `answer` and `continuation` in `answers`.",
    "tools": "The tools that were offered, in the OpenAI form, as JSON text; null where none were.",
    "n_tokens": "Tokens of prompt, tools and the longer side together.",
    "needs": "Places in `prompt` (from 0) of the messages without which a side would not be possible; "
    "a cut must leave them, and the step that each belongs to.",
    "session_id": "The session; a subagent has one of its own.",
    "conversation": "The conversation that the session is a part of; splits never cut one.",
    "client_texts": "Hash of the texts of the client that wrote the session, in `client_texts/`; null where "
    "the prompt has all there is.",
    "trace_batch": "The batch it came with; a batch is replaced as a whole.",
}
"""Columns that the pipeline's own tables do not have, or not like this."""
_FIGURES = {
    "states of recorded sessions": ("ingest", "n_states"),
    "answers of teachers": ("replay", "n_answers"),
    "answers made up in a rehearsal": ("replay", "n_rehearsed"),
    "failed calls": ("replay", "n_failed"),
    "US dollars spent on answers": ("replay", "spent_usd"),
    "states with a consensus": ("pairs", "n_consensus"),
    "of these, the agent agreed": ("pairs", "n_agreement"),
    "of these, the agent may be right too (lessons)": ("pairs", "n_lessons"),
    "answers that nobody confirmed": ("pairs", "n_answers"),
    "pairs before normalization": ("normalize", "n_in"),
    "pairs kept": ("normalize", "n_kept"),
}
_COUNTED = {
    "agreement": "agreement_level",
    "recorded outcome": "outcome",
    "source": "source",
    "agent's model": "student_model",
}


def render(manifests: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]) -> bytes:
    """Return the whole card: metadata for the Hub, then the text for readers."""
    # A batch without a row is no part of what is described.
    batches = [manifests[key] for key in sorted(manifests) if any(manifests[key]["files"].values())]
    rows = {
        config: {split: count for split, count in counts.items() if count}
        for config, counts in rows_by_split(manifests).items()
        if any(counts.values())
    }
    digest = content_digest(manifests)
    n_pairs = _sum(batches, "n_pairs")
    n_bytes = _added(batch["n_bytes"] for batch in batches)
    polls = (_stage(batch, "pairs").get("poll") for batch in batches)
    precision = PrecisionEvidence.pooled(filter(None, polls)).precision()
    dropped = _added(_stage(batch, "normalize").get("dropped", {}) for batch in batches)
    recipes = sorted({_stage(batch, "normalize").get("recipe", "") for batch in batches} - {""})
    card = _TEMPLATE.render(
        card_data=_yaml(_metadata(rows, facts, content=digest)),
        table=_table,
        percent=_percent,
        amount=_amount,
        title=facts.get("title", _TITLE),
        notes=facts.get("notes"),
        digest=digest,
        n_sessions=len({sha for batch in batches for sha in session_hashes(batch)}),
        n_conversations=len({sha for m in batches for sha in session_hashes(m, "conversations")}),
        n_batches=len(batches),
        n_pairs=n_pairs,
        n_rehearsed=sum(batch.get("n_rehearsed", 0) for batch in batches),
        n_hints=_sum(batches, "n_hints"),
        n_sharing_vendor=_sum(batches, "n_sharing_vendor"),
        n_distillable=_sum(batches, "n_distillable"),
        mean_bytes={
            side: round(n_bytes.get(side, 0) / max(n_pairs, 1)) for side in ("chosen", "rejected")
        },
        configs=[
            (f"`{config}`", _about(config), *(counts.get(split, 0) for split in SPLITS))
            for config, counts in rows.items()
        ],
        other_config=next((config for config in rows if config != "pairs"), None),
        lengths=_lengths(batches, rows),
        max_lengths=_max_lengths(batches, rows),
        not_cut=_not_cut(batches),
        columns=[(f"`{name}`", column_words(name)) for name in _column_names(rows)],
        counts=_shares(batches, n_pairs),
        teachers=_teachers(batches, facts),
        figures=_figures(batches),
        precision=precision.words() if precision.n_pairs else "nobody has checked a pair",
        recipes=", ".join(map(_code, recipes)),
        dropped=[(_code(name), n) for name, n in _by_size(dropped)],
        blind=in_words(facts.get("blind_control")) if n_pairs else "",
        control_run=[(_code(name), value) for name, value in facts.get("control_run", {}).items()],
        accepted_terms=", ".join(map(_code, facts.get("accepted_terms", ()))),
        n_with_texts=_added(batch.get("client_texts", {}) for batch in batches).get("n_pairs", 0),
        sample=_sample(batches),
    )
    return f"{card}\n".encode()


def _shares(
    batches: Sequence[Mapping[str, Any]], n_pairs: int
) -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Return how many pairs have each value of what is counted, by its title."""
    return [
        (title, [(_code(value), n, _percent(n, n_pairs)) for value, n in _by_size(counts)])
        for title, name in _COUNTED.items()
        for counts in [_added(batch["counts"][name] for batch in batches)]
    ]


def _yaml(metadata: Mapping[str, Any]) -> str:
    known = {key: value for key, value in metadata.items() if value is not None}
    text = yaml.dump(known, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=_NO_WRAP)
    return text.strip()


def _metadata(
    rows: Mapping[str, Mapping[str, int]], facts: Mapping[str, Any], *, content: str
) -> dict[str, Any]:
    n_rows = sum(rows.get("pairs", {}).values())
    license_ = facts.get("license", "other")
    return {
        "pretty_name": facts.get("title", _TITLE),
        "license": license_,
        "license_name": _LICENSE_NAME if license_ == "other" else None,
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
            # Without any config `datasets` would take every file for data, the manifests too.
            for config, splits in (rows or {"pairs": {"train": 0}}).items()
        ],
        "dataset_info": [
            {"config_name": config, "features": layout.features_of(layout.schema_of(config))}
            for config in rows
        ],
    }


def _column_names(configs: Iterable[str]) -> list[str]:
    """Return every column of the configs that have rows once, those of a kind of row first."""
    schemas = [layout.schema_of(config) for config in configs]
    every = dict.fromkeys(name for schema in schemas for name in schema.names)
    return [*(n for n in _COLUMNS if n in every), *(n for n in every if n not in _COLUMNS)]


def column_words(column: str) -> str:
    """Return the description of a published column. Raises KeyError if it has none."""
    return _COLUMNS.get(column) or describe("dpo_pairs", column)


def _about(config: str) -> str:
    if (length := layout.length_of(config)) is None:
        return _ABOUT[config]
    return f"the pairs, prompts cut to {length:,} tokens: what both sides need stays"


def _tokens(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    return batch.get("tokens", {})


def _lengths(
    batches: Sequence[Mapping[str, Any]], rows: Mapping[str, Any]
) -> tuple[list[str], list[Sequence[Any]]] | None:
    """Return head and rows of the table of lengths in tokens; `None` where none was counted."""
    counts = {
        config: _added(_tokens(batch).get("pairs", {}).get(config, {}) for batch in batches)
        for config in rows
    }
    sizes = sorted({int(size) for found in counts.values() for size in found})
    head = ["config", *(f"≤ {size:,}" for size in sizes), "longest"]
    lines: list[Sequence[Any]] = [
        (f"`{config}`", *(found.get(str(size), 0) for size in sizes), _longest(batches, config))
        for config, found in counts.items()
        if found
    ]
    return (head, lines) if lines else None


def _longest(batches: Iterable[Mapping[str, Any]], config: str) -> int:
    return max(_tokens(batch).get("longest", {}).get(config, 0) for batch in batches)


def _max_lengths(
    batches: Sequence[Mapping[str, Any]], rows: Mapping[str, Any]
) -> list[tuple[str, int]]:
    """Return what to tell a trainer for a config, so that it drops and truncates nothing."""
    found = {
        config: layout.length_of(config) or -(-_longest(batches, config) // 1_024) * 1_024
        for config in rows
    }
    return [(config, length) for config, length in found.items() if length]


def _not_cut(batches: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, int]]:
    found: Counter[tuple[str, str]] = Counter()
    for batch in batches:
        for config, reasons in _tokens(batch).get("not_cut", {}).items():
            found.update({(f"`{config}`", reason): n for reason, n in reasons.items()})
    return [(*key, n) for key, n in sorted(found.items())]


def _teachers(
    batches: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> tuple[list[str], list[Sequence[Any]]] | None:
    """Return head and rows of the table of teachers, without columns of which nothing is known."""
    votes = _added(batch["teachers_agreeing"] for batch in batches)
    costs = _added(_stage(batch, "replay").get("cost_by_teacher_usd", {}) for batch in batches)
    told = {teacher["name"]: teacher for teacher in facts.get("teachers", ()) if "name" in teacher}
    right = {each.teacher: each for each in strengths(_stage(batch, "pairs") for batch in batches)}
    names = sorted({*votes, *costs, *told})
    allows = {True: "yes", False: "no"}
    columns = {
        "teacher": [_code(name) for name in names],
        "model": [_code(told.get(name, {}).get("model", "")) for name in names],
        "votes in pairs": [votes.get(name, 0) for name in names],
        "cost, USD": [f"{costs[name]:.4f}" if name in costs else "" for name in names],
        "right, estimated": [f"{right[n].right:.0%}" if n in right else "" for n in names],
        "agent right there": [f"{right[n].agent_right:.0%}" if n in right else "" for n in names],
        "allows distillation": [
            allows.get(told.get(name, {}).get("is_distillable"), "not known") for name in names
        ],
    }
    known = {head: values for head, values in columns.items() if any(v != "" for v in values)}
    return (list(known), list(zip(*known.values(), strict=True))) if names else None


def _figures(batches: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return what the stages counted, as far as they did."""
    found = []
    for what, (stage, name) in _FIGURES.items():
        of_stage = [_stage(batch, stage) for batch in batches]
        if stage == "replay":  # what was made up is no answer, and nobody was paid for it
            of_stage = [
                s for s in of_stage if (name == "n_rehearsed") == bool(s.get("n_rehearsed"))
            ]
        known = [n for each in of_stage if (n := each.get(name)) is not None]
        if known:
            total = sum(known)
            found.append((what, f"{total:.4f}" if isinstance(total, float) else total))
    return found


def _sample(batches: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    sample: Mapping[str, str] = next((b["sample"] for b in batches if b["sample"]), {})
    titles = {"prompt": "prompt, last message", "chosen": "chosen", "rejected": "rejected"}
    return [(title, _indented(sample[key])) for key, title in titles.items() if sample.get(key)]


def _indented(message: str) -> str:
    text = printable(json.dumps(json.loads(message), indent=2, ensure_ascii=False))
    text = text.replace("~~~", "~ ~ ~")
    return text if len(text) <= _MAX_SAMPLE_CHARS else f"{text[:_MAX_SAMPLE_CHARS]} …"


def _stage(batch: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
    return batch["stages"].get(stage, {})


def _sum(batches: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(batch[name] for batch in batches)


def _added(counts: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _by_size(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"


def _amount(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(v).replace("|", "\\|").replace("\n", " ") for v in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _code(text: str) -> str:
    """Write a name that somebody else chose as code: nothing in it is taken for Markdown or HTML."""
    shown = " ".join(printable(text).replace("`", "'").split())
    return f"`{shown}`" if shown else ""
