"""Token ids at rest: those of the renderer, made once."""

import pytest

from tests.trainer.published import rows_of
from trainer.data import tokens
from trainer.data.dataset import PreferenceData
from trainer.data.hints import hint_for_row
from trainer.data.rendering import Renderer
from trainer.data.tokens import requests_of

BUDGETS = {"max_prompt_tokens": 250, "max_response_tokens": 8}


@pytest.fixture
def data():
    return PreferenceData(pairs=rows_of(3), test_pairs=rows_of(4)[-1:])


def filled(renderer, data, folder):
    requests = requests_of(data, hint_for_row, with_tools=renderer.with_tools)
    renderer.store.fill(requests, renderer, folder)
    return renderer


def everything(renderer, data):
    found = []
    for row in [*data.pairs, *data.test_pairs]:
        found += [renderer.row_prompt(row, hint=hint) for hint in (None, hint_for_row(row))]
        sides = ("chosen", "rejected")
        found += [renderer.response(row[side], after=row["prompt"]) for side in sides]
    return found


def test_what_is_looked_up_is_what_would_be_rendered(tokenizer, data, tmp_path):
    plain = everything(Renderer(tokenizer=tokenizer, **BUDGETS), data)
    renderer = filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path)
    assert everything(renderer, data) == plain
    assert any(cut.n_dropped_steps for _, cut in plain)  # what was cut is said as before
    assert any(cut.n_dropped_tokens for _, cut in plain)


def test_a_second_run_renders_nothing(tokenizer, data, tmp_path, monkeypatch):
    filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path)
    [file] = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    monkeypatch.setattr(Renderer, "render", None)
    renderer = filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path)
    everything(renderer, PreferenceData(pairs=data.pairs))
    assert [one.stat().st_mtime_ns for one in tmp_path.iterdir()] == [written]


def test_a_run_renders_what_is_new_to_it_and_keeps_what_it_made_when_stopped(
    tokenizer, data, tmp_path, monkeypatch
):
    first = PreferenceData(pairs=data.pairs[:4])
    filled(Renderer(tokenizer=tokenizer, **BUDGETS), first, tmp_path)
    rendered, render = [], Renderer.render

    def counted(renderer, request):
        rendered.append(request)
        if len(rendered) == 3:
            raise KeyboardInterrupt
        return render(renderer, request)

    monkeypatch.setattr(Renderer, "render", counted)
    monkeypatch.setattr(tokens, "_PER_BATCH", 1)
    with pytest.raises(KeyboardInterrupt):
        filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path)
    filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path)
    wanted, known = (
        {tokens.key_of(one) for one in requests_of(one, hint_for_row, with_tools=True)}
        for one in (data, first)
    )
    assert len(rendered) == len(wanted - known) + 1  # one of them twice: it was stopped there


@pytest.mark.parametrize(
    "change", [{"max_prompt_tokens": 251}, {"max_response_tokens": 9}, {"with_tools": False}]
)
def test_another_budget_is_another_file(tokenizer, data, tmp_path, change):
    filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path)
    filled(Renderer(tokenizer=tokenizer, **BUDGETS | change), data, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_processes_write_the_same_bytes(tokenizer, data, tmp_path, monkeypatch):
    filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path / "one")
    monkeypatch.setattr(tokens, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(tokens, "_PER_BATCH", 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    filled(Renderer(tokenizer=tokenizer, **BUDGETS), data, tmp_path / "two")
    [one], [two] = (list((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()
