"""The trainee (the model to be trained), served as an endpoint so that it can be sampled."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay_pipeline.errors import ConfigError, TrainError
from replay_pipeline.settings import TraineeSettings
from replay_pipeline.storage.processes import TRAINER, python, start_environment
from replay_pipeline.types import TeacherSpec

_STOP_S = 10.0


def trainee_of(trainee: TraineeSettings) -> TeacherSpec:
    """Return the trainee as a teacher to ask. Raises the errors of `samplers`."""
    return trainee.endpoint or _local(_folder(trainee))


def samplers(trainee: TraineeSettings) -> list[TeacherSpec]:
    """Return one name of the model for each sample, so that every sample is a separate question.

    A name contains a hash of the model's bytes, so samples of other weights don't count. Only
    `serving` knows the address of a served folder.

    Raises:
        ConfigError: the settings name neither a folder nor an endpoint, or both.
    """
    spec = trainee_of(trainee)
    limit = {"max_completion_tokens": trainee.max_completion_tokens}
    return [
        spec.model_copy(
            update={
                "name": f"{spec.name}:{number}",
                "params": {
                    **limit,
                    **spec.params,
                    "temperature": trainee.temperature,
                    "seed": number,
                },
            }
        )
        for number in range(1, trainee.n_samples + 1)
    ]


@contextmanager
def serving(trainee: TraineeSettings) -> Iterator[list[TeacherSpec]]:
    """Serve the model of a folder while it is used. A named endpoint is used as it is.

    Raises:
        ConfigError: the trainee can't be asked, as in `samplers`.
        TrainError: the model in the folder can't be served.
    """
    if trainee.endpoint is not None:
        yield samplers(trainee)
        return
    folder, specs = _folder(trainee), samplers(trainee)
    command = [*python(TRAINER, "serve"), "--model", str(folder), "--name", specs[0].model]
    command += ["--max-prompt-tokens", str(trainee.max_prompt_tokens)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=start_environment(),
        text=True,
    ) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            if not line:
                raise TrainError(f"{folder}: the model cannot be served: {' '.join(command)}")
            place = {"base_url": json.loads(line)["base_url"]}
            yield [spec.model_copy(update=place) for spec in specs]
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _folder(trainee: TraineeSettings) -> Path:
    if trainee.folder is None:
        raise ConfigError("no trainee: set `trainee.folder` to a checkpoint, or `trainee.endpoint`")
    if not any(trainee.folder.glob("*.safetensors")):
        raise ConfigError(f"trainee.folder: {trainee.folder} holds no weights (*.safetensors)")
    return trainee.folder


def _local(folder: Path) -> TeacherSpec:
    return TeacherSpec(
        name="trainee",
        model=_name(folder),
        base_url="http://127.0.0.1/v1",
        # Our own server cuts prompts as training does, on purpose: no answer is suspect for that.
        dialect="vllm",
        api_key_env=None,
        price={"prompt": 0.0, "completion": 0.0},
        max_concurrency=4,  # times four samples: a batch of the server
        is_distillable=True,
    )


def _name(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
    return f"{folder.name}@{digest.hexdigest()}"
