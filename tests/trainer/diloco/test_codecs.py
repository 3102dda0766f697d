"""Codecs: what comes back, how small, and that what is lost comes later."""

import numpy as np
import pytest

from trainer.diloco.codecs import CODECS, decode_payload, encode_payload
from trainer.diloco.exchange import ErrorFeedback
from trainer.errors import OuterLoopError

# Relative error on normal values, and how many times fewer bytes than float32, at the least.
PROMISES = {
    "fp32": (0.0, 0.99),
    "ternary": (0.95, 25.0),
}


def values(n=100_000, scale=1e-4, seed=0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e3])
def test_values_come_back_within_the_promised_error_and_size(name, scale):
    vector = values(scale=scale)
    payload = encode_payload(CODECS[name], vector)
    back = decode_payload(CODECS[name], payload, vector.size)
    error, ratio = PROMISES[name]
    assert np.linalg.norm(back - vector) <= error * np.linalg.norm(vector)
    assert vector.nbytes / len(payload) >= ratio


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("n", [1, 2, 4, 5, 127, 128, 129, 4095, 4097])
def test_any_length_comes_back_with_that_length(name, n):
    vector = values(n)
    back = decode_payload(CODECS[name], encode_payload(CODECS[name], vector), n)
    assert back.shape == (n,)
    largest = np.argmax(np.abs(vector))
    assert np.sign(back[largest]) == np.sign(vector[largest])


def test_error_feedback_sends_everything_in_the_end():
    feedback = ErrorFeedback(CODECS["ternary"], np.zeros(5000, np.float32))
    wanted = np.zeros(5000, np.float32)
    sent = np.zeros(5000, np.float32)
    for step in range(40):
        delta = values(5000, scale=1.0, seed=step)
        wanted += delta
        sent += decode_payload(CODECS["ternary"], feedback.encode(delta), 5000)
        feedback.settle(was_included=True)
    np.testing.assert_allclose(sent + feedback.residual, wanted, atol=2e-3)


@pytest.mark.parametrize("name", CODECS)
def test_damage_is_an_error_and_never_a_value(name):
    vector = values(3000)
    payload = encode_payload(CODECS[name], vector)
    for wrong in (payload[:-7], payload[: len(payload) // 2], b"", b"\x00" * 40):
        with pytest.raises(OuterLoopError):
            decode_payload(CODECS[name], wrong, vector.size)
    with pytest.raises(OuterLoopError):
        decode_payload(CODECS[name], payload, vector.size - 1)


def test_a_payload_of_another_codec_is_refused():
    payload = encode_payload(CODECS["ternary"], values(100))
    with pytest.raises(OuterLoopError, match="fp32 were expected"):
        decode_payload(CODECS["fp32"], payload, 100)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    vector = values(100)
    vector[7] = bad
    with pytest.raises(OuterLoopError, match="not finite"):
        encode_payload(CODECS["fp32"], vector)
