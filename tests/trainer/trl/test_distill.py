"""`replay: distill`: frozen teachers of two tokenizers, held to a plain account of what they charge."""

import copy
import json
import threading
from contextlib import contextmanager

import httpx
import pytest
import torch
from safetensors.torch import load_file
from trl.experimental.async_distillation.async_rollout_worker import (
    _parse_teacher_logprobs_at_position as parsed_by_trl,
)
from trl.generation.vllm_client import VLLMClient

from tests.listener import stranger
from tests.trainer.programs import start_ranks
from tests.trainer.published import rows_of
from tests.trainer.training import PLAIN
from trainer.data.rendering import Renderer
from trainer.data.rewards import as_trl_reward, consensus_reward
from trainer.data.rollouts import contrast_rollouts
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.engines.capabilities import check
from trainer.engines.settings_file import read_settings
from trainer.errors import TrainerConfigError, TrainerError
from trainer.model import teachers as teachers_module
from trainer.model.serve import LocalModel, ModelServer
from trainer.model.teachers import ScoringServer, load_teachers
from trainer.trl import ComposerConfig, ComposerReplicationTrainer
from trainer.trl.run import run, without_upstream_warnings

pytestmark = pytest.mark.slow

ONLY_DISTILL = {
    "replay": "distill", "beta_replay": 1.0, "policy_weight": 0.0, "max_steps": 1, "optim": "sgd",
    "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
}  # fmt: skip
ACCURACIES = {"same": 0.6, "other": 0.2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Two teachers that are sure of something: one of the trainee's tokenizer, one of another."""
    place = tmp_path_factory.mktemp("teachers")
    other = train_tokenizer(corpus(rows_of(2)), vocab_size=330)
    assert other.get_vocab() != tokenizer.get_vocab()
    for seed, (name, theirs) in enumerate({"same": tokenizer, "other": other}.items(), start=5):
        model = make_model(theirs, hidden_size=32, n_layers=1, n_heads=2, seed=seed)
        with torch.no_grad():
            model.model.norm.weight.mul_(6)
        model.save_pretrained(place / name)
        theirs.save_pretrained(place / name)
    return place


@contextmanager
def served(folder):
    with ModelServer(LocalModel(folder), folder.name) as running:
        thread = threading.Thread(target=running.serve_forever, args=[0.02])
        thread.start()
        try:
            yield running.base_url
        finally:
            running.shutdown()
            thread.join()


def settings_of(output, teachers, **trl):
    told = {"dataset": "none", "output": str(output), "teachers": teachers}
    return read_settings(told | {"trl": {"replay": "distill", "beta_replay": 1.0} | trl})


def options_of(folders, **urls):
    return [
        {"model": str(folders / name), "accuracy": accuracy}
        | ({"url": urls[name], "name": name, "top_k": 10_000} if name in urls else {})
        for name, accuracy in ACCURACIES.items()
    ]


def trained(output, model, tokenizer, teachers, **settings):
    """A trainer after its steps, with the rollouts that it drew."""
    renderer = Renderer(
        tokenizer=tokenizer, max_prompt_tokens=256, max_response_tokens=64, with_tools=False
    )
    loaded = load_teachers(settings_of(output, teachers), renderer, "cpu")
    args = ComposerConfig(output_dir=str(output), **(PLAIN | ONLY_DISTILL | settings))
    with without_upstream_warnings():
        trainer = ComposerReplicationTrainer(
            model,
            as_trl_reward(consensus_reward),
            args,
            recorded=contrast_rollouts(rows_of(3), renderer),
            processing_class=tokenizer,
            teachers=loaded,
        )
        read, drawn = trainer.distill.read, []

        def read_and_kept(rows, batch):
            found = read(rows, batch)
            drawn.extend(zip(rows, found["distill"], strict=True))
            return found

        trainer.distill.read = read_and_kept
        trainer.train()
    return trainer, drawn


# -- the plain account ------------------------------------------------------------------------------


def ends_of(tokenizer, text):
    """Where each token of a text ends, by the tokenizer's own account of it."""
    return [end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]]


def by_hand(p, q, beta):
    """Divergence of two lists of probabilities: p the trainee's, q the teacher's."""
    if beta == 0.0:
        return (q * (q.log() - p.log())).sum()
    if beta == 1.0:
        return (p * (p.log() - q.log())).sum()
    m = (1 - beta) * p + beta * q
    return beta * (q * (q / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum()


def with_rest(probabilities):
    """All the rest as one more entry, which is never counted as less than 1e-7."""
    return torch.cat([probabilities, (1 - probabilities.sum(0, keepdim=True)).clamp_min(1e-7)])


def probabilities_of(model, prompt, answer):
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].softmax(-1)


def plain_charge(model, tokenizer, teacher, its_tokenizer, row, rollout, beta):
    """What one teacher charges a rollout, and how many tokens it covers."""
    answer = rollout.answer_ids
    mine = probabilities_of(model, rollout.prompt_ids, answer)
    if tokenizer.get_vocab() == its_tokenizer.get_vocab():
        with torch.no_grad():
            theirs = probabilities_of(teacher, rollout.prompt_ids, answer)
        return sum(by_hand(p, q, beta) for p, q in zip(mine, theirs, strict=True)), len(answer)
    assert answer[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(answer[:-1])
    its_answer = [*its_tokenizer(text)["input_ids"], its_tokenizer.eos_token_id]
    renderer = Renderer(tokenizer=its_tokenizer, max_prompt_tokens=9_999, with_tools=False)
    with torch.no_grad():
        theirs = probabilities_of(teacher, renderer.prompt_ids(row["prompt"]), its_answer)
    here, there = ends_of(tokenizer, text), ends_of(its_tokenizer, text)
    added = [*tokenizer.added_tokens_decoder.values(), *its_tokenizer.added_tokens_decoder.values()]
    special = {token.content for token in added if token.special}
    vocabularies = tokenizer.get_vocab(), its_tokenizer.get_vocab()
    names = sorted(set(vocabularies[0]) & set(vocabularies[1]) - special)
    ids = [
        [known[name] for name in names] + [one.eos_token_id]
        for known, one in zip(vocabularies, (tokenizer, its_tokenizer), strict=True)
    ]
    charged, before = 0.0, (0, 0)
    for end in [*sorted(set(here) & set(there)), None]:
        upto = (
            (len(answer), len(its_answer))
            if end is None
            else (here.index(end) + 1, there.index(end) + 1)
        )
        (a, b), (c, d) = zip(before, upto, strict=True)
        before = upto
        if b - a == d - c == 1:
            p, q = with_rest(mine[a][ids[0]]), with_rest(theirs[c][ids[1]])
        else:
            p, q = (
                with_rest(
                    torch.stack([one[i, token] for i, token in enumerate(tokens[x:y], x)]).prod()[
                        None
                    ]
                )
                for one, tokens, x, y in ((mine, answer, a, b), (theirs, its_answer, c, d))
            )
        charged = charged + by_hand(p, q, beta)
    return charged, len(answer)


def plain_gradient(model, tokenizer, folders, drawn, beta):
    weights = {name: one / sum(ACCURACIES.values()) for name, one in ACCURACIES.items()}
    loss, n_tokens = 0.0, sum(len(one.answer_ids) for _, one in drawn)
    for name, weight in weights.items():
        teacher = LocalModel(folders / name)
        teacher.model.double()
        for row, rollout in drawn:
            charged, _ = plain_charge(
                model, tokenizer, teacher.model, teacher.renderer.tokenizer, row, rollout, beta
            )
            loss = loss + weight * charged / n_tokens
    return loss, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(
    ("at_server", "settings"),
    [
        ((), {"jsd_beta": 0.0}),
        (("other",), {"jsd_beta": 1.0}),
        (
            ("same", "other"),
            {"jsd_beta": 0.5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        ),
    ],
    ids=str,
)
def test_a_step_is_the_plain_gradient_of_two_teachers_and_two_tokenizers(
    tmp_path, model, tokenizer, folders, at_server, settings
):
    before = copy.deepcopy(model).eval().double()
    with served(folders / "same") as one, served(folders / "other") as two:
        urls = {name: url for name, url in (("same", one), ("other", two)) if name in at_server}
        trainer, drawn = trained(
            tmp_path, model, tokenizer, options_of(folders, **urls), **settings
        )
    assert len(drawn) == 4
    loss, gradients = plain_gradient(before, tokenizer, folders, drawn, settings["jsd_beta"])
    assert trainer.n_live_steps == {
        "policy": 0,
        "sdpo": 0,
        "replay": trainer.args.gradient_accumulation_steps,
    }
    [logged] = [row for row in trainer.state.log_history if "replay/loss" in row]
    assert logged["replay/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert logged["replay/covered"] == 1.0
    moved = trainer.accelerator.unwrap_model(trainer.model).parameters()
    for old, new, gradient in zip(before.parameters(), moved, gradients, strict=True):
        torch.testing.assert_close(old.float() - new, gradient.float(), rtol=0, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 3e-3
    counts = trainer.distill.teachers[1].counts
    assert counts["in_spans"] > 0
    assert counts["aligned"] + counts["in_spans"] == counts["tokens"]


def test_a_teacher_that_is_the_trainee_charges_nothing(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    trainer, _ = trained(tmp_path / "out", model, tokenizer, [{"model": str(tmp_path / "m")}])
    [logged] = [row for row in trainer.state.log_history if "replay/loss" in row]
    assert logged["replay/loss"] == pytest.approx(0.0, abs=1e-9)
    assert logged["replay/n_tokens"] > 50


def test_what_the_trainee_samples_is_what_teachers_score(tmp_path, dataset_folder, folders):
    """A whole run: the tiny model samples, and no record is read but the prompts."""
    report = run(
        read_settings(
            {
                "dataset": str(dataset_folder),
                "output": str(tmp_path),
                "tiny": {"vocab_size": 400, "hidden_size": 32, "n_layers": 1},
                "rollouts": "generate",
                "teachers": options_of(folders),
                "evaluation": {"max_pairs": 2, "max_prompts": 1, "max_new_tokens": 4},
                "trl": PLAIN
                | {"replay": "distill", "beta_replay": 1.0, "policy_weight": 0.0, "jsd_beta": 1.0}
                | {"max_steps": 12, "max_completion_length": 24, "learning_rate": 1e-2},
            }
        )
    )
    assert report["channels_live"] == ["replay"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [row["replay/loss"] for row in rows if "replay/loss" in row]
    assert len(losses) == 12
    assert sum(loss > 0 for loss in losses) >= 9
    assert report["loss_last"] < 0.9 * report["loss_first"]
    assert [(one["weight"], one["has_trainees_tokenizer"]) for one in report["teachers"]] == [
        (0.75, False),
        (0.25, False),
    ]
    for one in report["teachers"]:
        # Random weights write bytes that are not text; whatever is text is covered.
        assert 0 < one["aligned"] + one.get("in_spans", 0) <= one["tokens"]


def test_two_ranks_learn_what_one_does(tmp_path, folders):
    from tests.trainer.trl.distill_worker import main  # it imports from here

    alone, together = tmp_path / "alone", tmp_path / "together"
    together.mkdir()
    worker = "tests.trainer.trl.distill_worker"
    ranks = start_ranks("-m", worker, str(together), str(folders), n=2, folder=tmp_path)
    alone.mkdir()
    main(alone, folders, n_rows=4)
    for process in ranks:
        status, errors = process.ended(400)
        assert status == 0, errors[-3000:]
    expected = load_file(alone / "rank0-of-1.safetensors")
    for rank in ("0", "1"):
        for name, value in load_file(together / f"rank{rank}-of-2.safetensors").items():
            torch.testing.assert_close(value, expected[name], atol=2e-6, rtol=0)


# -- what a server says -----------------------------------------------------------------------------


@torch.no_grad()
def test_trl_reads_our_servers_answer_as_we_do(folders):
    """TRL's readers of vLLM's form, which its own teacher servers are asked by."""
    with served(folders / "other") as url:
        ids = [[5, 9, 14, 20, 31, 8]]
        sent = {"model": "other", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 4}
        body = ScoringServer(url, "other", top_k=4)._post(httpx.Client(), sent)
        [scores] = ScoringServer(url, "other", top_k=4).scores([(ids[0][:2], ids[0][2:])])
    [choice] = body["choices"]
    theirs = VLLMClient._format_sequence_logprobs(choice, ids[0], 2, 4)
    logits = LocalModel(folders / "other").model(input_ids=torch.tensor(ids)).logits[0]
    for place, (of_token, top, logps) in enumerate(
        zip(scores, theirs["logprob_token_ids"], theirs["logprobs"], strict=True)
    ):
        expected = logits[place + 1].log_softmax(-1)
        assert [of_token[i] for i in top] == logps
        assert (
            dict(zip(*parsed_by_trl(choice["prompt_logprobs"][place + 2]), strict=True)) == of_token
        )
        for i, logp in of_token.items():
            assert logp == pytest.approx(float(expected[i]), abs=1e-5)
        assert set(expected.topk(4).indices.tolist()) <= set(of_token)
        assert ids[0][place + 2] in of_token


@pytest.mark.parametrize(
    ("request_", "said"),
    [({"prompt": "text"}, "400"), ({"prompt": [1, 2]}, "prompt_logprobs"), ({"prompt": []}, "400")],
)
def test_a_completion_that_scores_nothing_is_refused(folders, request_, said):
    with served(folders / "other") as url, pytest.raises(TrainerError, match=said):
        ScoringServer(url, "other", top_k=4)._post(httpx.Client(), request_)


def test_a_server_without_scores_of_prompts_is_named(tmp_path):
    with (
        stranger() as other,
        pytest.raises(TrainerError, match="returns no log-probabilities of a"),
    ):
        ScoringServer(f"{other.url}/v1", "m", top_k=4).scores([([1], [2])])


def test_scores_of_another_tokenizers_tokens_are_refused(folders):
    with (
        served(folders / "other") as url,
        pytest.raises(TrainerError, match=r"400|another tokenizer"),
    ):
        ScoringServer(url, "other", top_k=4).scores([([1], [100_000])])


def test_a_server_that_is_away_is_waited_for_and_then_named(monkeypatch):
    pauses = []
    monkeypatch.setattr(teachers_module.time, "sleep", pauses.append)
    with pytest.raises(
        TrainerError, match=r"no answer from the teacher after 4 tries \(ConnectError"
    ):
        ScoringServer("http://127.0.0.1:9/v1", "m", top_k=4).scores([([1], [2])])
    assert pauses == [1.0, 2.0, 4.0]


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("teachers", "trl", "said"),
    [
        ([], {}, "belong together"),
        ([{"model": "a"}], {"replay": "pairs"}, "belong together"),
        ([{"model": "a"}], {"beta_replay": 0.0}, "belong together"),
        ([{"model": "a", "accuracy": 0.5}, {"model": "b"}], {}, "for all of them or for none"),
        ([{"model": "a", "accuracy": 50}], {}, "not in \\(0, 1\\]"),
        ([{"model": "a", "rate": 1}], {}, r"unknown setting teachers\[0\]\.rate"),
        ([{"model": "a", "url": "http://x/v1"}], {"temperature": 0.7}, "servers score at"),
        ([{"model": "a"}], {"sdpo_wrapper": "taid"}, "TAID"),
        ([{"model": "a"}], {"sdpo_estimator": "topk"}, "remove both"),
        ([{"model": "a"}], {"replay": "both"}, "replay='both' is not pairs or distill"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path, teachers, trl, said):
    with pytest.raises(TrainerConfigError, match=said):
        settings_of(tmp_path, teachers, **trl)


def test_engines_without_it_refuse_it(tmp_path):
    told = {"dataset": "d", "output": str(tmp_path), "teachers": [{"model": "a"}]}
    told |= {"rollouts": "generate", "trl": {"replay": "distill", "beta_replay": 1.0}}
    for engine in ("verl", "prime_rl", "tinker"):
        with pytest.raises(TrainerConfigError, match=r"trl\.replay=distill: frozen teachers"):
            check(read_settings(told, engine))
    check(read_settings(told, "monarch"))


def test_a_teacher_that_is_not_there_is_named(tmp_path, tokenizer):
    with pytest.raises(TrainerConfigError, match=r"teachers: model=.*nowhere: no tokenizer there"):
        load_teachers(
            settings_of(tmp_path, [{"model": str(tmp_path / "nowhere")}]),
            Renderer(tokenizer=tokenizer),
            "cpu",
        )
