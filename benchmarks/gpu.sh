#!/usr/bin/env bash
# Everything that needs a GPU, as one command: tests, a training run, the benchmarks; one JSON.
#
#   benchmarks/gpu.sh                 # <= 12 minutes on one GPU; writes benchmarks/results/gpu.json
#   GPU_MODEL=FOLDER benchmarks/gpu.sh  # a model for trainer/gpu.yaml; else that of `make real-model`
#   benchmarks/gpu.sh --dry           # all steps on the CPU, in small shapes
#   benchmarks/gpu.sh --fetch WHEELS  # where there is a network: the wheels to carry (about 4 MiB)
#   benchmarks/gpu.sh --wheels WHEELS # where there is none: install them first, into a folder of its own
#
# The GPU machine brings Python 3.12, torch, transformers, accelerate, peft, pyarrow and pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
if [ "${1:-}" = --fetch ]; then
  exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --dest "$2" --requirement benchmarks/gpu-wheels.txt
fi
if [ "${1:-}" = --wheels ]; then
  site="$(mktemp -d)"
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$2"/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
  shift 2
fi
exec "$python" benchmarks/gpu.py "$@"
