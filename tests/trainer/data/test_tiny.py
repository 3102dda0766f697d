import torch

from trainer.data.tiny import make_model


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
