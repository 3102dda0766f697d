"""Log-probabilities of responses without the logits of a batch: the same numbers, less memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.families import causal_lm
from tests.trainer.published import rows_of
from trainer.data.collator import ComposerDataCollator
from trainer.engines.trl.run import run
from trainer.losses.compose import pair_logps
from trainer.model import scoring
from trainer.settings import RunConfig, TinyOptions


def qwen(n_words):
    return causal_lm("qwen2", vocab_size=n_words)


def soft_capped(n_words):
    model = causal_lm("gemma2", vocab_size=n_words, head_dim=8, final_logit_softcapping=2.0)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("make", [qwen, soft_capped])
def test_pairs_and_gradients_are_those_of_the_logits_of_the_batch(tokenizer, make):
    model = make(len(tokenizer)).eval()
    batch = ComposerDataCollator(tokenizer, with_tools=False)(rows_of(2))
    ours, plain = (forward(model, batch) for forward in (scoring.chunked_pair_logps, pair_logps))
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for (chosen, n_chosen), (rejected, n_rejected) in (ours, plain):
        assert [n_chosen.tolist(), n_rejected.tolist()] == [n.tolist() for _, n in plain]
        gradients.append(torch.autograd.grad((chosen - rejected).sum(), trained, allow_unused=True))
    for (mine, _), (theirs, _) in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(*gradients, strict=True):
        if theirs is not None:
            # As a whole: how single elements are rounded depends on the processor.
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_a_temperature_divides_the_logits(tokenizer):
    model = qwen(len(tokenizer)).eval()
    ids = torch.arange(3, 23)[None]
    mask = (torch.arange(20) > 11).int()[None]
    logp = (model(ids).logits[0, 11:-1] / 0.5).log_softmax(-1)
    torch.testing.assert_close(
        scoring.chunked_response_logps(model, ids, None, mask, temperature=0.5),
        logp.gather(-1, ids[0, 12:, None])[:, 0],
    )


MOST_ROWS = 256
"""Tokens whose logits may exist at the same time."""


class LargestLogits(TorchDispatchMode):
    """Notes the most rows that any tensor of one column per word of the vocabulary has."""

    def __init__(self, n_words):
        super().__init__()
        self.n_words, self.n_rows = n_words, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.dim() and one.shape[-1] == self.n_words:
                self.n_rows = max(self.n_rows, one.numel() // self.n_words)
        return result


def test_the_plain_path_makes_them(tokenizer):
    batch = ComposerDataCollator(tokenizer, with_tools=False)(rows_of(4))
    with LargestLogits(len(tokenizer)) as seen:
        pair_logps(qwen(len(tokenizer)), batch)
    assert seen.n_rows > MOST_ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "pair_forward"),
    [("all", "packed"), ("pairs alone", "padded"), ("policy alone", "packed")],
)
def test_no_run_makes_the_logits_of_a_batch(
    dataset_folder, tmp_path, monkeypatch, channels, pair_forward
):
    # Of a vocabulary as small as this one, TRL's kernels would make all entries at once.
    monkeypatch.setattr("trainer.model.causal_lm.WIDTH", 64)
    monkeypatch.setattr("trl.kernels.chunked_divergence.VOCAB_CHUNK_SIZE", 64)
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 64)
    weights = {
        "all": {"alpha_sdpo": 0.5, "beta_replay": 1.0},
        "policy alone": {},
        "pairs alone": {"policy_weight": 0.0, "beta_replay": 1.0},
    }[channels]
    n_words = 331  # of no other tensor of the run
    config = RunConfig(
        tiny=TinyOptions(vocab_size=n_words, pretraining_steps=1),
        dataset=str(dataset_folder),
        output=str(tmp_path / "out"),
        trl={"max_steps": 2, "pair_forward": pair_forward, "max_prompt_tokens": 256} | weights,
    )
    with LargestLogits(n_words) as seen:
        run(config)
    assert 0 < seen.n_rows <= MOST_ROWS
