"""One rank of a data-parallel run; started by test_trl_ddp.py, writes its weights."""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(settings_path: str) -> None:
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(
        "agent_fixtures", Path(__file__).parents[1] / "conftest.py"
    )
    fixtures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fixtures)

    from trainer.data.tiny import corpus, make_model, train_tokenizer
    from trainer.integrations.trl.run import without_upstream_warnings

    settings = json.loads(Path(settings_path).read_text())
    output, n_pairs = Path(settings.pop("output")), settings.pop("n_pairs")
    rows = [row for session in range(3) for row in fixtures.session_rows(session)]
    tokenizer = train_tokenizer(corpus(rows), vocab_size=512)
    model = make_model(tokenizer, hidden_size=32, n_layers=2, n_heads=2, seed=1)
    with without_upstream_warnings():
        trainer = fixtures.make_trainer(
            output, model, tokenizer, rows=rows, pairs=rows[:n_pairs], **settings
        )
        trainer.train()
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    rank = trainer.accelerator.process_index
    save_file(
        {name: value.clone() for name, value in state.items() if name != "lm_head.weight"},
        output / f"rank{rank}-of-{trainer.accelerator.num_processes}.safetensors",
    )
    report = {"live": trainer.n_live_steps, "log": trainer.state.log_history}
    (output / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
