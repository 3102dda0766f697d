import torch

from trainer.data.collator import EXAMPLE_ROW, ComposerDataCollator
from trainer.data.tiny import make_model, pretrain
from trainer.losses.compose import pair_logps


def test_a_mimetic_model_proposes_what_stands_in_its_prompt_before_any_training(tokenizer):
    words = torch.arange(300, 340)
    prompt = words[:20].unsqueeze(0)
    gains = {}
    for is_mimetic in (False, True):
        model = make_model(tokenizer, hidden_size=128, n_layers=1, is_mimetic=is_mimetic).eval()
        with torch.no_grad():
            logits = model(input_ids=prompt).logits[0, -1].log_softmax(-1)
        shown, others = logits[words[:19]], logits[words[20:]]
        gains[is_mimetic] = float(shown.mean() - others.mean())
    assert abs(gains[False]) < 0.1
    assert gains[True] > 1.0


def test_pretraining_teaches_what_actions_look_like_and_no_preference(tokenizer):
    """Twins: each action is the chosen one once, so that learning both alike prefers neither."""
    turned = {"chosen": EXAMPLE_ROW["rejected"], "rejected": EXAMPLE_ROW["chosen"]}
    twins = [EXAMPLE_ROW, {**EXAMPLE_ROW, **turned}]
    collator = ComposerDataCollator(tokenizer, max_prompt_tokens=320)
    model = make_model(tokenizer, hidden_size=32, n_layers=1, n_heads=2)

    def scores():
        with torch.no_grad():
            (chosen, n_chosen), (rejected, n_rejected) = pair_logps(model, collator(twins))
        return (chosen / n_chosen), (rejected / n_rejected)

    before = torch.cat(scores()).mean()
    pretrain(model, collator, twins, n_steps=10)
    chosen, rejected = scores()
    assert torch.cat([chosen, rejected]).mean() > before + 0.5
    torch.testing.assert_close((chosen - rejected).sum(), torch.tensor(0.0), atol=1e-4, rtol=0)
