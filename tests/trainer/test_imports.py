import subprocess
import sys

import pytest

import trainer
from trainer import diloco

pytestmark = pytest.mark.slow


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_trainer_is_light():
    assert not modules_after("import trainer") & {"torch", "transformers", "trl", "datasets"}


def test_losses_need_torch_alone():
    loaded = modules_after("import trainer.losses")
    assert "torch" in loaded
    assert not loaded & {"transformers", "trl", "datasets", "replay_pipeline"}


def test_public_names_resolve():
    assert all(getattr(trainer, name) is not None for name in trainer.__all__)
    assert set(trainer.__all__) <= set(dir(trainer))


def test_the_outer_loop_answers_to_its_published_name_too():
    assert all(getattr(diloco, name) is not None for name in diloco.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        trainer.nothing  # noqa: B018
