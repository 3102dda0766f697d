"""The recipes as they are shipped, and on the bundled sample."""

import re
from pathlib import Path

import pytest

import replay_pipeline
from replay_pipeline.normalize import DJNormalizer, bundled_recipes, load_recipe
from replay_pipeline.normalize.recipe import recipes_dir
from replay_pipeline.settings import Settings
from replay_pipeline.stages.pipeline import Pipeline
from replay_pipeline.testing.sample import SESSIONS_DIR

REPO = Path(replay_pipeline.__path__[0]).parent


@pytest.mark.parametrize("name", ["agent", "default", "lint", "strict", "tool_calls"])
def test_every_recipe_loads_and_no_step_leaves_a_parameter_to_an_earlier_one(name):
    """data-juicer's own command lets a second use of an operator inherit parameters of the first."""
    DJNormalizer(name)
    given: dict[str, set[str]] = {}
    steps = load_recipe(name).process
    for step in steps:
        for operator, arguments in step.items():
            assert given.setdefault(operator, set(arguments)) == set(arguments)
    assert len(steps) >= 4


@pytest.mark.slow
def test_the_recipes_keep_of_the_sample_what_their_page_says(tmp_path):
    settings = {
        "data_dir": tmp_path,
        "ingest": {"sources": [SESSIONS_DIR]},
        "replay": {"sample_teachers": True, "gates": []},
        "pairs": {"min_p_better": 0},  # as the demo
    }
    loaded = Settings.model_validate(settings)
    work = Pipeline(loaded)
    [batch] = work.ingest_new()
    work.replay(batch)
    work.pairs(batch)
    pairs, prompts = work.root.read("dpo_pairs", batch), work.prompts(batch)
    page = (recipes_dir() / "README.md").read_text("utf-8")
    said = dict(re.findall(r"\| `(\w+)\.yaml` \| (\d+)", page))
    kept = {
        name: str(DJNormalizer(name).run(pairs, prompts=prompts).report.n_kept)
        for name in bundled_recipes()
    }
    assert said == kept
    assert f"the {len(pairs)} pairs" in page


def test_fields_of_a_recipe_that_have_no_effect_are_told(tmp_path, caplog):
    path = tmp_path / "mine.yaml"
    path.write_text("np: 1\nproces: []\nexecutor_type: ray\nprocess: [pair_identical_filter]\n")
    with caplog.at_level("WARNING"):
        load_recipe(path)
        for name in bundled_recipes():
            load_recipe(name)
    [record] = caplog.records
    assert record.getMessage() == (
        f"recipe {path}: only `process` is read; executor_type, proces has no effect"
    )
