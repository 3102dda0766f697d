import pytest
import yaml

from replay_pipeline.publish import publish
from replay_pipeline.publish.layout import CONFIGS, schema_of
from tests.replay_pipeline.publish.rows import kept_row, kept_table, positives_table
from tests.support.hub import HubServer

FACTS = {
    "title": "Pairs of a team",
    "teachers": [
        {
            "name": "qwen",
            "model": "qwen/qwen3-coder",
            "is_distillable": True,
        }
    ],
    "accepted_terms": ["vendor/model"],
    "control_run": {"accuracy, format only": 0.51},
    "notes": "Made for a test.",
    "replay": {
        "b1": {
            "n_answers": 30,
            "spent_usd": 0.5,
            "cost_by_teacher_usd": {"qwen": 0.5},
            "n_sent": 7,
        },
        "b2": {"n_answers": 12, "spent_usd": 0.25, "cost_by_teacher_usd": {"qwen": 0.25}},
        "other": {"n_answers": 1000},
    },
    "normalize": {"b1": {"recipe": "strict", "n_in": 12, "dropped": {"pair_secret_filter": 2}}},
}


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "set"
    publish(
        [("b1", kept_table(*range(10))), ("b2", kept_table(*range(10, 14)))],
        folder=folder,
        positives=[("b2", positives_table(77))],
        card_facts=FACTS,
    )
    return (folder / "README.md").read_text("utf-8")


def metadata(card):
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_tells_what_the_data_and_the_caller_know(card):
    for text in (
        "# Pairs of a team",
        "| `positives` | lessons: states with the action that the teachers agree on, where the agent took it or may be right too |",
        "7 sessions in 2 trace batches",
        "| `qwen` | `qwen/qwen3-coder` | 14 | 0.7500 | yes |",
        "| `deepseek` |  | 14 |  | not known |",
        "| answers of teachers | 42 |",
        "| US dollars spent on answers | 0.7500 |",
        "| `pair_secret_filter` | 2 |",
        "Recipe: `strict`.",
        "`accuracy, format only` | 0.51",
        "The publisher used `vendor/model`",
        "true for 9 of 14 pairs",
        "Made for a test.",
        "## A row",
        '"src/module_0.py"',
    ):
        assert text in card


def test_an_empty_line_stands_before_every_table(card):
    lines = ["", *card.splitlines()]
    heads = [n for n, line in enumerate(lines) if line.startswith("| --- ")]
    assert len(heads) > 5
    assert [lines[n - 1] for n in heads if lines[n - 2]] == []


def test_the_metadata_declares_every_config_and_column(card):
    data = metadata(card)
    assert [config["config_name"] for config in data["configs"]] == [
        *(name for name in CONFIGS if name != "answers"),  # it has no rows
        "pairs_8k",
    ]
    assert [config["config_name"] for config in data["configs"] if config.get("default")] == [
        "pairs"
    ]
    for info in data["dataset_info"]:
        assert [f["name"] for f in info["features"]] == schema_of(info["config_name"]).names
    assert data["license"] == "other"
    assert data["size_categories"] == ["n<1K"]


def test_the_card_passes_the_validation_of_the_hub_client(card, monkeypatch):
    from huggingface_hub import DatasetCard, DatasetCardData

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    parsed = DatasetCard(card)
    assert isinstance(parsed.data, DatasetCardData)
    assert parsed.data.configs
    with HubServer() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        parsed.validate(repo_type="dataset")
        assert hub.requests() == ["POST /api/validate-yaml 200"]


def test_a_licence_of_the_caller_replaces_the_default(tmp_path):
    publish([("b", kept_table(1))], folder=tmp_path, card_facts={"license": "cc-by-4.0"})
    data = metadata((tmp_path / "README.md").read_text("utf-8"))
    assert data["license"] == "cc-by-4.0"
    assert "license_name" not in data


def test_the_text_of_a_session_cannot_break_out_of_its_cell_or_block(tmp_path):
    row = kept_row(
        1,
        teachers_agreeing=["a | b\n# title"],
        rejected_messages_json='[{"role": "assistant", "content": "~~~\\n# escaped"}]',
    )
    publish([("b", kept_table(row))], folder=tmp_path / "set")
    card = (tmp_path / "set" / "README.md").read_text("utf-8")
    assert "a \\| b # title" in card
    assert not any(line.startswith("# ") for line in card.split("## A row")[1].splitlines())
