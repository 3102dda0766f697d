"""Who and where somebody is: login names, full names, hosts and addresses of a session."""

import pytest

from replay_pipeline.redaction.people import People, homes_in, hosts_in, user_of
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
    ("text", "people"),
    [
        (
            r"/Users/janedoe/a, /home/mkowal. C:\Users\tlind\x /home/tli/a /home/ab/a /home/ubuntu/a",
            {"janedoe", "~mkowal", "tlind", "~tli"},
        ),
        ("Author: Jane Doe <jane@shop.dev>", {"Jane Doe", " Jane"}),
        ("Author: Ana Sousa\nDate: today", {"Ana Sousa"}),
        ("Commit: Ana Sousa\n", {"Ana Sousa"}),
        ("committer Ana Sousa <ana@shop.dev> 1700000000", {"Ana Sousa", " Sousa"}),
        ("tagger Ana Sousa\n", {"Ana Sousa"}),
        ("Signed-off-by: Ana Sousa\n", {"Ana Sousa"}),
        ("Reviewed-By: Ana Sousa\n", {"Ana Sousa"}),
        ('git config user.name "Ana Sousa"\n', {"Ana Sousa"}),
        ("user.name=Ana Sousa\n", {"Ana Sousa"}),
        ('"createdBy":"Ana Sousa"', {"Ana Sousa"}),
        ('"assignee": "Ana Sousa"', {"Ana Sousa"}),
        ("[user]\n\tname = Ana Sousa\n", {"Ana Sousa"}),
        (
            "Author: Anna Maria Berg <anna@shop.dev>",
            {"Anna Maria Berg", " Anna", " Berg"},
        ),
        ("Author: Mark D'Arcy <mark@shop.dev>", {"Mark D'Arcy"}),
        ("Author: Code Admin <a@shop.dev>", set()),
        ('{"login":"mkowal","name":"Lea Kowal"}', {"mkowal", "Lea Kowal", " Kowal"}),
        (r"{\"login\":\"mkowal\",\"name\":\"Lea Kowal\"}", {"mkowal", "Lea Kowal", " Kowal"}),
        ('{"login": "mkowal", "id": 1}', {"mkowal"}),
        ('{"login": "github"}', set()),
        ("author:\tmkowal\nstate:\tOPEN", {"mkowal"}),
        ("Thanks @mkowal and @tlind", {"mkowal", "tlind"}),
        ("diff with origin/tlind/fix", {"tlind/", "origin/tlind/"}),
        ("cd worktrees/tlind/fix", set()),
        ("cd worktrees/tlind/fix on branch tlind/fix", {"tlind/", "worktrees/tlind/"}),
        ("diff origin/dependabot/npm origin/claude/fix-1 origin/codex/fix", set()),
        ('{"login": "shop-bot"}', set()),
        ("app/Users/profile and lib/home/page", set()),
        ("/home/tlind/a and /Users/tlind/b", {"tlind"}),
        ("branch.tlind/fix.merge", {"tlind/", "branch.tlind/"}),
        ("commits\n[tlind/fix 1a2b3c4] Fix", {"tlind/"}),
        ("on branch tlind/fix", {"tlind/"}),
        ("Deleted branch 'tlind/fix'", {"tlind/"}),
        ("merge into tlind/fix", {"tlind/"}),
        ("merge into 'tlind/fix'", {"tlind/"}),
        ("{Name:tlind/fix IsCurrent:true}", {"tlind/"}),
        ("{Name:feature/fix IsCurrent:true}", set()),
        ("diff with origin/Feature/cart", set()),
        ("Merge pull request #12 from acme/tlind/fix", {"tlind/", "acme/tlind/"}),
        ("Merge pull request #12 from acme/feature/fix", set()),
        ("Please ask Tlind about it", set()),
        ("ask Tlind about origin/tlind/fix", {"tlind", "tlind/", "origin/tlind/"}),
    ],
)
def test_the_people_of_a_session_are_collected_from_where_they_are_told(
    text: str, people: set[str]
):
    assert people_in(["a line before", text, "a line behind"]) == people


def test_the_home_folders_of_a_session_become_those_of_a_user():
    people = People(frozenset({"tlind", "tli", "ana", "root", "Ana Sousa", "tlind/"}))
    text = "/Users/tlind/a /home/tlind/a /home/tli/b /Users/root/c /Users/anab/c ana/d"
    assert people.in_homes(text) == [
        ("/Users/tlind/", "/Users/user/"),
        ("/home/tlind/", "/home/user/"),
        ("/home/tli/", "/home/user/"),
    ]


def test_a_name_is_never_put_together_from_two_texts():
    assert people_in(["the folder is /home/ja", "nedoe is here"]) == frozenset()
    assert people_in(["written by Author: Ana", "Sousa Lind"]) == frozenset()


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


@pytest.mark.parametrize(
    "text",
    [
        "COPY Dockerfile.porter porter.yaml porter/main.py ./",
        "docker compose up porter --scale porter=3",
        "class Porter: ...  # the porter's queue",
        "PORTER_TOKEN and porter_id",
    ],
)
def test_a_part_that_a_program_plays_in_an_image_is_no_persons_name(text: str):
    told = "WORKDIR /home/porter/app"
    people = people_in([told, text])
    assert Redactor().text(text, users=people) == text
    assert Redactor().text(told, users=people) == "WORKDIR /home/user/app"


@pytest.mark.parametrize(
    "text", ["porter@box: ~porter", "drwxr-xr-x 2 porter staff 64 May 1", "uid=1000(porter)"]
)
def test_the_owner_of_a_home_folder_is_replaced_where_an_account_stands(text: str):
    assert "porter" not in Redactor().text(text, users=people_in(["cd /home/porter/shop", text]))


@pytest.mark.parametrize(
    "text", ["worker.py and Dockerfile.worker", "/home/worker/app", "worktrees/cart/src/cart.py"]
)
def test_files_and_worktrees_keep_their_names(text: str):
    people = people_in([text, "ls /home/worker worktrees/cart/src"])
    assert Redactor().text(text, users=people) == text


def test_a_file_that_has_the_name_of_its_owner_keeps_it():
    people = people_in(["cd /Users/janedoe/shop"])
    told = Redactor().text(
        "janedoe edits janedoe.py, janedoe-test.ts, Dockerfile.janedoe", users=people
    )
    assert told == "user edits janedoe.py, janedoe-test.ts, Dockerfile.janedoe"


def mentioned(text: str, *names: str) -> list[tuple[str, str]]:
    """What is found of these people in a text: as it stands there, and its kind."""
    found = sorted(People(frozenset(names)).mentions(text))
    return [(text[start:end], kind) for start, end, kind in found]


@pytest.mark.parametrize(
    ("names", "text", "found"),
    [
        (["Ana Sousa"], "Ana Sousa", [("Ana Sousa", "name")]),
        (["Ana Sousa"], "aAna Sousa, Ana Sousas, _Ana Sousa, Ana Sousa_1", []),
        (["Ana Sousa"], "(Ana Sousa)-Ana Sousa", [("Ana Sousa", "name")] * 2),
        ([" Ana"], "Ana's and Anas", [("Ana", "name")]),
        (["tlind"], "tlind", [("tlind", "user_name")]),
        (["tlind"], "atlind tlinda 1tlind tlind2", []),
        (["tlind"], "_tlind_ TLIND", [("tlind", "user_name"), ("TLIND", "user_name")]),
        (["tlind"], '🙂é tlind é,tlind "é', [("tlind", "user_name")] * 2),
        (["Tlind", "mkowal"], "é mkowal, tlind", [("mkowal", "user_name"), ("tlind", "user_name")]),
        (["tlind"], "\ud800 tlind", [("tlind", "user_name")]),
        (["jürg"], "über jürg é JÜRG", [("jürg", "user_name")]),
        (["tli"], "tli and tlis, a tli", []),
        (["tlind/"], "tlind/fix", [("tlind", "user_name")]),
        (["tlind/"], "tlind/ x", []),
        (["tlind/"], "_tlind/a /tlind/a .tlind/a -tlind/a xtlind/a", []),
        (["tlind/"], "'tlind/a (tlind/b", [("tlind", "user_name")] * 2),
        (["origin/tlind/"], "origin/tlind/fix", [("tlind", "user_name")]),
        (["origin/tlind/"], "remotes/origin/tlind/fix", [("tlind", "user_name")]),
        (["origin/tlind/"], "xorigin/tlind/fix, origin/tlind/ fix", []),
        (["branch.tlind/"], "branch.tlind/fix.merge", [("tlind", "user_name")]),
        (["branch.t.lind/"], "branch.t.lind/fix.merge", [("lind", "user_name")]),
    ],
)
def test_people_are_found_between_what_may_stand_around_their_names(
    names: list[str], text: str, found: list[tuple[str, str]]
):
    assert mentioned(text, *names) == found


@pytest.mark.parametrize(
    ("text", "n_found"),
    [
        ("tli@box", 1),
        (r"tli\box", 1),
        ("~tli/shop", 1),
        ("chown (tli) /tli @tli", 3),
        ("Tli@box", 1),
        ("TLI@box", 0),
        ("atli@box", 0),
        ("-rw-r--r-- 1 tli staff 12", 1),
        ("tli   1234  0.0 node", 1),
        ("node 1234 tli  23u", 1),
        ("on tli's laptop", 1),
        ("on tli's list", 0),
        ("tli is an acronym", 0),
    ],
)
def test_a_short_login_name_is_replaced_only_as_an_account(text: str, n_found: int):
    found = mentioned(text, "tli")
    assert [kind for _, kind in found] == ["user_name"] * n_found
    assert {name.lower() for name, _ in found} <= {"tli"}


def test_a_login_name_that_nobody_owns_is_not_replaced():
    assert mentioned("root@box, ab@box, ubuntu", "root", "ab", "ubuntu") == []


def test_a_login_name_with_a_surname_is_a_full_name():
    redacted = Redactor().text('{"name":"Janedoe Sousa"}', users=people_in(SESSION))
    assert redacted.startswith('{"name":"<NAME:')
    assert "Sousa" not in redacted
    assert mentioned('"tlind Sousa"', "tlind") == [
        ("tlind", "user_name"),
        ("tlind Sousa", "name"),
    ]
    assert mentioned('tlind Sousa"', "tlind") == [("tlind", "user_name")]


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


def places(text: str) -> list[tuple[str, str]]:
    return [(text[start:end], kind) for start, end, kind in hosts_in(text, 0, len(text))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ssh build-7.corp now", [("build-7.corp", "host")]),
        ("http://box.lan:80 and box.internal", [("box.lan", "host"), ("box.internal", "host")]),
        ("Settings.Local and host.docker.internal", []),
        (
            "DESKTOP-A1B2C3D and LAPTOP-9Z8Y7X6W",
            [("DESKTOP-A1B2C3D", "host"), ("LAPTOP-9Z8Y7X6W", "host")],
        ),
        ("a MacBook, an iMac", []),
        ("Anas-iMac.fritz", [("Anas-iMac.fritz", "host")]),
        ("Linux build-7 6.1.0", [("build-7", "host")]),
        ("Linux kernel six", []),
        (
            "from 93.184.216.34 to 93.184.216.35",
            [("93.184.216.34", "address"), ("93.184.216.35", "address")],
        ),
        ("dns 8.8.8.8, 1.1.1.1 then 93.184.216.34", [("93.184.216.34", "address")]),
        (
            "93.184.0.0, 10.0.0.7, 127.0.0.1, 93.184.216.999 and 93.184.216.34",
            [("93.184.216.34", "address")],
        ),
        ("version 93.184.216.34 from 93.184.216.35", [("93.184.216.35", "address")]),
        ("version: '93.184.216.34', >=93.184.216.34, v93.184.216.34", []),
        ("the versions 93.184.216.34", [("93.184.216.34", "address")]),
    ],
)
def test_hosts_and_addresses_are_told_from_what_looks_like_them(
    text: str, found: list[tuple[str, str]]
):
    assert places(text) == found


def test_home_folders_are_found_with_every_separator():
    text = "/Users/ana/a /home/lea /Users/root/a -Users-kim-a -home-tom-a /home/user/a"
    assert [(text[start:end], kind) for start, end, kind in homes_in(text)] == [
        ("ana", "home"),
        ("kim", "home"),
        ("lea", "home"),
        ("tom", "home"),
    ]


def test_a_working_directory_tells_its_user():
    for nobodys in ("/home/ab/shop", "/home/runner/work", "/srv/app", None):
        assert user_of(nobodys) is None
    assert user_of("/home/abc/shop") == "abc"
    assert user_of("/home/ab/x/Users/kimlee/shop") == "kimlee"
