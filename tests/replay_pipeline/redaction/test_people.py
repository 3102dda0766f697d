"""Who and where somebody is: login names, full names, hosts and addresses of a session."""

import pytest

from replay_pipeline.redaction.redactor import Redactor
from replay_pipeline.redaction.scanning import people_in

SESSION = (
    "cwd /Users/janedoe/shop",
    "Author: Jane Doe <jane@shop.dev>",
    '{"login":"mkowal","name":"Maria Kowal"}',
    "See 'origin/tlind/fix-cart'",
)


def clean(text: str) -> str:
    return Redactor().text(text, users=people_in(SESSION))


@pytest.mark.parametrize(
    "text",
    [
        "janedoe           512   0.0  0.1 /usr/libexec/trustd",
        "node    1234 janedoe   23u  IPv6 0x1  0t0  TCP *:3000 (LISTEN)",
        "-rw-r--r--  1 janedoe  staff  12 Mar  1 a.txt",
        "uid=501(janedoe) gid=20(staff)",
        "owner: janedoe",
        "Janedoe has pushed",
        "git checkout janedoe/fix-login",
        "reviewer @mkowal asks",
        "On branch tlind/fix-cart",
        "`tlind/fix-cart` is behind",
    ],
)
def test_a_login_name_of_the_session_is_replaced_wherever_it_stands(text: str):
    redacted = clean(text).lower()
    assert "user" in redacted
    assert not {"janedoe", "mkowal", "tlind"} & set(redacted.replace("/", " ").split())
    assert "janedoe" not in redacted


@pytest.mark.parametrize("name", ["Jane Doe", "Maria Kowal"])
def test_a_full_name_gets_one_placeholder_in_the_whole_session(name: str):
    first, second = clean(f"by {name}, today"), clean(f"thanks to {name}!")
    assert name not in first + second
    assert first[3:18] == second[10:25]
    assert first[3:9] == "<NAME:"


@pytest.mark.parametrize(
    "text",
    ["Maria's change is in", "as Jane asked", "ask Kowal", '"createdBy":"Ana Sousa","n":1'],
)
def test_parts_of_a_full_name_and_other_ways_to_tell_an_author_are_replaced(text: str):
    people = people_in([*SESSION, text])
    redacted = Redactor().text(text, users=people)
    assert "<NAME:" in redacted
    assert not any(name in redacted for name in ("Maria", "Jane", "Kowal", "Sousa"))


@pytest.mark.parametrize(
    ("told", "text", "redacted"),
    [
        ("git show origin/tlind/fix\nDid you ask Tlind?", "Tlind's model", "user's model"),
        ("Thanks to @mkowal, @ana-s, and @tlind for", "| #12 | @ana-s |", "| #12 | @user |"),
        ("It was reported by @mkowal but also @tlind", "tlind was first", "user was first"),
        ("- @ana-s made their first contribution", "12 - ana-s", "12 - user"),
        (
            "branch.tlind/fix.merge=main",
            "branch.tlind/fix.merge=main",
            "branch.user/fix.merge=main",
        ),
        ("{Name:tlind/fix IsCurrent:true}", "Name:tlind/fix", "Name:user/fix"),
        ("/home/tli/shop", "not on Tli's machine", "not on user's machine"),
    ],
)
def test_somebody_whom_a_text_tells_of_is_replaced(told: str, text: str, redacted: str):
    assert Redactor().text(text, users=people_in([told])) == redacted


def test_a_login_name_with_a_surname_is_a_full_name():
    redacted = Redactor().text('{"name":"Janedoe Sousa"}', users=people_in(SESSION))
    assert redacted.startswith('{"name":"<NAME:')
    assert "Sousa" not in redacted


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ("Did you ask Postgres? share it with Docker", "Docker's images"),
        ("validated by @override", "the @override there"),
        ("branch docker/base", "Docker's images"),
    ],
)
def test_a_word_that_may_be_a_product_stays(told: str, text: str):
    assert Redactor().text(text, users=people_in([told, "branch docker/base"])) == text


def test_a_title_is_no_name():
    text = "## Auto-Commit Strategy\n\nThe Strategy decides."
    assert Redactor().text(text, users=people_in([text])).count("Strategy decides") == 1


def test_a_name_that_is_a_word_is_replaced_only_as_an_account():
    redactor = Redactor()
    people = people_in(["/home/mark/shop"])
    assert redactor.text("mark the row as done", users=people) == "mark the row as done"
    line = "mark   1234  0.0 python"
    assert redactor.text(line, users=people) == line.replace("mark", "user")


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Darwin janes-box.fritz.box 23.1.0 Darwin Kernel", "janes-box.fritz.box"),
        ("Linux build-7 6.1.0-18 x86_64", "build-7"),
        ("http://janes-laptop.local:3000", "janes-laptop.local"),
        ("Last login on Janes-MacBook-Pro", "Janes-MacBook-Pro"),
        ("connected to 93.184.216.34 port 22", "93.184.216.34"),
    ],
)
def test_hosts_and_public_addresses_are_replaced(text: str, hidden: str):
    redactor = Redactor()
    redactor.prepare([text, "another text"])
    assert hidden not in redactor.text(text)
    assert redactor.text(text) == Redactor().text(text)


@pytest.mark.parametrize(
    "text",
    [
        "listening on 127.0.0.1:8080 and 192.168.1.20",
        "Chrome/120.0.0.0 Safari/537.36",
        "version 4.2.1.7 is out",
        "see .claude/settings.local.json and settings.local",
        "import foo.internal.bar; x.local()",
        "git merge feature/cart and origin/release/2.1",
        "* main 1a2b3c4d\n[origin/main: ahead 1] up to date with 'origin/main'",
        "export class UserService extends Base {}",
    ],
)
def test_what_tells_nothing_about_anybody_stays(text: str):
    assert clean(text) == text
