"""VeRL's real FSDP engine with the plug-in, on one and on two ranks."""

import json

import pytest
from cpu_run import HERE, free_port, run

from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.engines.handover import write_pairs
from trainer.engines.verl.options import VARIABLE, PluginOptions

WORKER = str(HERE / "engine_worker.py")


@pytest.fixture(scope="session")
def pairs(dataset, model, tmp_path_factory):
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    renderer = Renderer(
        tokenizer=AutoTokenizer.from_pretrained(model),
        max_prompt_tokens=96,
        window="tail",
        max_response_tokens=32,
    )
    rows = load_preference_data(dataset).pairs[:7]
    write_pairs(path, [row | {"weight": 1.0 + i % 3} for i, row in enumerate(rows)], renderer)
    return path


def options_for(pairs, tmp_path, **more) -> PluginOptions:
    values = {
        "alpha_sdpo": 0.1,
        "beta_replay": 0.05,
        "sdpo_top_k": 16,
        "dpo_variant": "dpo",
        "pairs_per_step": 5,
        "max_steps": 10,
    }
    return PluginOptions(
        pairs=str(pairs), reference=str(tmp_path / "reference.json"), **values | more
    )


def seen(options: PluginOptions, model, tmp_path, n_ranks: int) -> dict:
    out = tmp_path / "seen.json"
    command = [WORKER, str(model), str(out)]
    if n_ranks > 1:
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={n_ranks}"]
        command = [*launcher, "--master-addr=127.0.0.1", f"--master-port={free_port()}", *command]
    done = run(command, **{VARIABLE: options.as_json()})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_gradient_of_three_channels_is_the_cores(n_ranks, model, pairs, tmp_path):
    """Float32 throughout; five pairs on two ranks leave one of them with filler."""
    result = seen(options_for(pairs, tmp_path), model, tmp_path, n_ranks)
    assert result["is_ours"]
    assert result["world"] == n_ranks
    assert result["relative_error"] < 1e-6
    assert result["steps"] == 3
    for metrics in result["history"]:
        assert metrics["sdpo/n_tokens"] == 8 + 8 + 6
        assert metrics["replay/n_pairs"] == 5
    assert result["history"][0]["replay/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert all(metrics["sdpo/loss"] > 0 for metrics in result["history"])
    assert "alpha_sdpo=0.1 and the batch has no teacher_ids" in result["refusal"]


@pytest.mark.parametrize(("wrapper", "variant"), [("taid", "simpo"), ("entropy_opd", "dpo_norm")])
def test_other_forms_of_the_channels_have_the_cores_gradient(
    wrapper, variant, model, pairs, tmp_path
):
    changed = {"sdpo_top_k": 8, "sdpo_wrapper": wrapper, "dpo_variant": variant}
    options = options_for(pairs, tmp_path, **changed, policy_weight=0.5)
    result = seen(options, model, tmp_path, 1)
    assert result["relative_error"] < 1e-6
    if wrapper == "taid":
        assert [m["sdpo/taid_t"] for m in result["history"]] == pytest.approx([0.4, 0.46, 0.52])
