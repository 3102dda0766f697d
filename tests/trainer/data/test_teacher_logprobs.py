"""A teacher's tokens in the student's: where both cut the same bytes, and nowhere else."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from trainer.data.alignment import vocabulary_bytes
from trainer.data.rendering import Renderer
from trainer.data.teacher_logprobs import AnswerReader

RECORDED = Path(__file__).parents[2] / "replay_pipeline/testing/real_servers.json"
PROMPT = [{"role": "user", "content": "Fix the test."}]
TEXT = 'Read {"file_path": "cart.py"} 🦜 ü'


def token_of(spelled: bytes):
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)


def row_of(positions):
    return {"prompt": PROMPT, "tools": None, "logprobs": json.dumps(positions)}


def scored_by_itself(tokenizer, text=TEXT):
    """What a teacher with this very tokenizer would send of a text."""
    spelled = vocabulary_bytes(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    positions = [
        [[token_of(spelled[i]), -0.5], [token_of(spelled[(i + 7) % 250 + 3]), -1.5]] for i in ids
    ]
    return ids, positions


@pytest.fixture
def reader(tokenizer):
    return AnswerReader(Renderer(tokenizer=tokenizer, with_tools=False))


def test_every_token_of_a_teacher_with_the_same_tokenizer_counts(reader, tokenizer):
    ids, positions = scored_by_itself(tokenizer)
    (answer,) = reader.read([row_of(positions)])
    assert answer.answer_ids == ids
    assert answer.places == list(range(len(ids)))
    assert [support[0] for support in answer.support] == ids
    assert answer.prompt_ids == reader.renderer.prompt_ids(PROMPT)
    assert all(logps[0] == -0.5 for logps in answer.logps)
    assert reader.counts["aligned"] == reader.counts["tokens"] == len(ids)
    assert any(isinstance(position[0][0], list) for position in positions)  # half characters


def test_tokens_that_are_cut_otherwise_are_masked_and_counted(reader, tokenizer):
    ids, _ = scored_by_itself(tokenizer)
    whole = [[[word, -0.5]] for word in ("Read", ' {"file_path": "cart.py"} 🦜 ü')]
    (answer,) = reader.read([row_of(whole)])
    read = tokenizer("Read", add_special_tokens=False)["input_ids"]
    assert (len(read), answer.places) == (1, [0])
    counts = reader.counts
    assert counts["tokens"] == len(ids) == counts["aligned"] + counts["other_cut"]
    assert reader.read([row_of([[[TEXT, -0.5]]])]) == []


def test_alternatives_that_the_student_has_no_token_for_stay_in_the_rest(reader):
    position = [["Read", -0.5], ["R", -2.0], ["no such token", -2.5], ["Read", -3.0]]
    (answer,) = reader.read([row_of([position])])
    assert [len(support) for support in answer.support] == [2]
    assert answer.logps == [[-0.5, -2.0]]
    assert (reader.counts["alternatives"], reader.counts["alternatives_unknown"]) == (3, 2)


def test_what_is_beyond_the_budget_is_counted(tokenizer):
    ids, positions = scored_by_itself(tokenizer)
    renderer = Renderer(tokenizer=tokenizer, with_tools=False, max_response_tokens=3)
    reader = AnswerReader(renderer)
    (answer,) = reader.read([row_of(positions)])
    assert answer.answer_ids == ids[:3]
    assert answer.places == [0, 1, 2]
    assert reader.counts["too_long"] == len(ids) - 3


def sentence_piece(pieces):
    """A tokenizer of SentencePiece's kind with these pieces, and a token for each byte."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    names += sorted({*pieces, *(char for piece in pieces for char in piece)} - {*names})
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = []
    for piece in sorted(pieces, key=len):
        if len(piece) > 1:
            for end in range(1, len(piece)):
                merges.append((piece[:end], piece[end]))
                vocabulary.setdefault(piece[: end + 1], len(vocabulary))
    backend = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_sentence_piece_is_spelled_out_in_bytes_and_prefers_what_it_writes():
    tokenizer = sentence_piece(["▁ok", "Say"])
    spelled = vocabulary_bytes(tokenizer)
    ids = tokenizer("Say ok é", add_special_tokens=False)["input_ids"]
    assert b"".join(spelled[i] for i in ids) == "Say ok é".encode()
    assert len(ids) == 5  # Say, ▁ok, ▁, and the two bytes of é
    of_bytes = {text: token_id for token_id, text in spelled.items()}
    assert tokenizer.convert_ids_to_tokens(of_bytes[b" "]) == "▁"
    assert tokenizer.convert_ids_to_tokens(of_bytes[b"\xc3"]) == "<0xC3>"


def test_an_answer_that_a_real_server_was_recorded_to_send_is_read():
    """Llama.cpp says which ids its tokens have; a tokenizer with its pieces cuts the text alike."""
    from replay_pipeline.replay.replies import Answer, read_reply

    recorded = json.loads(RECORDED.read_text("utf-8"))
    (found,) = [
        each
        for each in recorded
        if each["case"] == "token probabilities" and each["server"].startswith("llama.cpp")
    ]
    answer = read_reply(200, {}, json.dumps(found["reply"]).encode())
    assert isinstance(answer, Answer)
    assert answer.logprobs is not None
    sent = found["reply"]["choices"][0]["logprobs"]["content"]
    assert len(answer.logprobs) == len(sent) == 24
    for position, entry in zip(answer.logprobs, sent, strict=True):
        written = bytes(entry["bytes"])
        assert token_of(written) == position[0][0]
        assert position[0][1] == pytest.approx(entry["logprob"], abs=1e-6)
        others = [each for each in entry["top_logprobs"] if each["bytes"] != entry["bytes"]]
        assert [token for token, _ in position[1:]] == [token_of(bytes(o["bytes"])) for o in others]
    joined = b"".join(bytes(entry["bytes"]) for entry in sent).decode()
    assert joined.startswith(found["reply"]["choices"][0]["message"]["content"])
