"""A secret that one text of a session gives away goes from all of its texts, and from answers."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pytest

from benchmarks.planted_secrets import REPEATED, given_away
from replay_pipeline.ingesters import ingest
from replay_pipeline.redaction.redactor import Redactor
from replay_pipeline.stages.work.redacting import masked_answers
from replay_pipeline.types import TeacherAction
from tests.replay_pipeline.ingesters.logs import Log, tool_use

N_VALUES = 400


def test_of_400_values_each_repeated_in_five_forms_none_is_left():
    told = given_away(N_VALUES)
    redactor, left, n_false = Redactor(), [], 0
    code = "import shop\nsrc/github/app.ts:42 raises ValueError(1234567) in load_settings_v2()"
    for given, value in told:
        texts = [write(value) for write in REPEATED.values()]
        _, known = redactor.learn([given.text, *texts, code])
        for form, text in zip(REPEATED, texts, strict=True):
            clean = redactor.text(text, known=known)
            forms = {value, value[2:-2], quote(value, safe=""), json.dumps(value)[1:-1]}
            if any(each in clean for each in forms) or "<SECRET:" not in clean:
                left.append((given.kind, given.context, form, text, clean))
        n_false += redactor.text(code, known=known) != code
    assert left == []
    assert n_false <= 0.02 * N_VALUES


def test_a_session_is_redacted_as_a_whole(tmp_path: Path):
    secret = "q7Uxv29Kpw41LmZt8Rb3Yd1"
    log = Log()
    log.user(f"log in with {secret} please")
    log.says("m1", f"I try {secret}", tool_use("c1", "Bash", command=f"./login {secret}"))
    log.answers("c1", f"export API_TOKEN={secret}")
    log.says("m2", base64.b64encode(f"token {secret}".encode()).decode())
    result = ingest(log.write(tmp_path))
    shown = json.dumps([table.to_pylist() for table in (result.turns, result.states)], default=str)
    assert secret not in shown
    assert shown.count("<SECRET:assigned-secret:") == 5


@pytest.mark.parametrize("write", REPEATED.values())
def test_an_answer_is_masked_by_what_its_prompt_showed(write: Callable[[str], str]):
    redactor = Redactor(salt="s")
    secret = "hH7gg2kLmQ9x"
    shown = redactor.text(f"export DB_PASSWORD={secret}").partition("=")[2]
    assert redactor.masked(f"I run shopctl -p {secret} twice", {}).count(secret) == 1
    clean = redactor.masked(write(secret), {shown[-9:-1]: shown})
    assert secret not in clean
    assert shown in clean
    assert redactor.masked(
        "nothing of 4 words and src/github/app.ts:42", {shown[-9:-1]: shown}
    ) == ("nothing of 4 words and src/github/app.ts:42")


@pytest.mark.parametrize(
    "text",
    [
        "token: src/github/app.ts:42",
        "secret: lib/shop/db2.py:17-30",
        "password: src/Db/Pool2.ts:42",
    ],
)
def test_a_file_and_its_line_are_no_secret(text: str):
    assert Redactor().text(text) == text


def test_teachers_answers_are_masked_and_nothing_else_of_them_changes():
    shown = Redactor(salt="s").text("export DB_PASSWORD=hH7gg2kLmQ9x")
    prompts = [pa.table({"messages_json": [json.dumps([{"role": "tool", "content": shown}])]})]
    call = {"id": "c", "type": "function"}
    told = {"name": "Bash", "arguments": '{"command":"psql -W hH7gg2kLmQ9x"}'}
    action = {"role": "assistant", "content": "", "tool_calls": [call | {"function": told}]}
    plain = {"role": "assistant", "content": "All of it is done."}
    asked = [
        TeacherAction(state_id="s1", teacher="t", action=each) for each in (action, plain, None)
    ]
    first, *others = masked_answers(asked, prompts, salt="s")
    (masked,) = first.action["tool_calls"]
    secret = shown.partition("=")[2]
    assert json.loads(masked["function"]["arguments"]) == {"command": f"psql -W {secret}"}
    assert others == asked[1:]


def test_a_word_that_is_somebodys_password_stays_a_word():
    redactor = Redactor()
    texts = ["postgres://app:shopping@db.internal:5432/shop", "we went shopping"]
    _, known = redactor.learn(texts)
    assert redactor.text(texts[1], known=known) == texts[1]
    assert "shopping" not in redactor.text(texts[0], known=known)
