"""Export a model from an outer loop's store: add the files that a snapshot lacks, and write a folder."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from trainer.diloco.codecs import seal_tensors, sha256, unseal_tensors
from trainer.diloco.exchange import read_whole
from trainer.diloco.object_store import ObjectStore, open_store
from trainer.diloco.parameters import ParameterVector
from trainer.diloco.replica import newest_state
from trainer.errors import OuterLoopError, TrainerConfigError, TrainerError

TEMPLATE = "model/"
"""Folder of the model's other files in the store: configuration, tokenizer, and untrained weights."""
COMPLETE = f"{TEMPLATE}complete.safetensors"


def publish_template(store: ObjectStore, trainer: Trainer) -> None:
    """Put the model's other files into the store, unless they are there. The run has the trained weights.

    A snapshot is only a vector of the trained parameters. These files define the model around it.
    """
    if store.get(COMPLETE) is not None or trainer.processing_class is None:
        return
    model: Any = trainer.model
    with tempfile.TemporaryDirectory() as folder:
        # Not by the trainer, whose way to save sharded models wants all ranks.
        model.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
    for name, data in sorted(files.items()):
        store.put(f"{TEMPLATE}{name}", data)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    hashes = {name: sha256(data) for name, data in files.items()}
    # The last one: whoever finds it finds them all.
    store.put(COMPLETE, seal_tensors({"trained": trained, "files": hashes}, {}))


def export_model(uri: str, output: str, *, round_id: int | None = None) -> int:
    """Write the model after some rounds (the newest by default) as a folder for `from_pretrained`.

    Returns:
        The number of rounds of the model.

    Raises:
        OuterLoopError: The store lacks this state or the model's files.
    """
    store = open_store(uri)
    found, theta, run = newest_state(store, round_id)
    sealed = read_whole(store, COMPLETE, unseal_tensors)
    if sealed is None:
        raise OuterLoopError(f"{uri} has no model: no trainer ran its replicas")
    with tempfile.TemporaryDirectory() as folder:
        for name, sha in sealed[0]["files"].items():
            data = store.get(f"{TEMPLATE}{name}")
            if data is None or sha256(data) != sha:
                raise OuterLoopError(f"{store.place}{TEMPLATE}{name} is damaged or gone")
            Path(folder, name).write_bytes(data)
        model = _loaded(folder)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in sealed[0]["trained"])
        view = ParameterVector(model)
        if view.signature != run["signature"]:
            raise OuterLoopError(f"the model in {uri} is not the one that was trained there")
        view.write(theta)
        model.save_pretrained(output)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        tokenizer.save_pretrained(output)
    return found


def _loaded(folder: str) -> Any:
    if Path(folder, "adapter_config.json").exists():
        return AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)
    if not Path(folder, "config.json").exists():
        raise TrainerConfigError(f"{folder} has no model configuration")
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def export_command(arguments: Sequence[str]) -> int:
    """Run `export` from the command line, and return 0 on success or 2 if the store has no such model."""
    parser = argparse.ArgumentParser(
        prog="replay-train export",
        description="Write the model of an outer loop's store, as from_pretrained loads it.",
    )
    parser.add_argument("--uri", required=True, help="the run's store")
    parser.add_argument("--output", required=True, help="a folder")
    parser.add_argument("--round", type=int, help="after so many rounds (default: the newest)")
    options = parser.parse_args(arguments)
    try:
        n_rounds = export_model(options.uri, options.output, round_id=options.round)
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{options.output}: the model after {n_rounds} rounds\n")
    return 0
