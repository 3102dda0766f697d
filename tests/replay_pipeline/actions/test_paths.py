"""Names of one file: a state on a drive of Windows compares as its twin on another system."""

import json

import pytest

from replay_pipeline.actions import agreement_level, canonical_action
from replay_pipeline.actions.native import NativeForm
from replay_pipeline.actions.paths import absolute, home_of, relative, without_needless_cd
from tests.support.messages import call

DRIVE, POSIX = "C:\\Users\\ada\\shop", "/home/ada/shop"
SPELLINGS = [
    "src/cart.py",
    "src\\cart.py",
    ".\\src\\cart.py",
    "C:\\Users\\ada\\shop\\src\\cart.py",
    "c:\\users\\ada\\shop\\src\\cart.py",
    "C:/Users/ada/shop/src/cart.py",
    "/c/Users/ada/shop/src/cart.py",
    "/mnt/c/Users/ada/shop/src/cart.py",
    "~\\shop\\src\\cart.py",
    "C:\\Users\\ada\\shop\\lib\\..\\src\\cart.py",
]


def read(path, cwd):
    return canonical_action(call("Read", file_path=path), cwd=cwd)


@pytest.mark.parametrize("cwd", [DRIVE, "c:/Users/ada/shop", "/c/Users/ada/shop"])
@pytest.mark.parametrize("path", SPELLINGS)
def test_every_spelling_of_a_path_on_a_drive_is_its_twins(path, cwd):
    assert relative(path, cwd) == "src/cart.py"
    assert read(path, cwd).render() == read("src/cart.py", POSIX).render()
    assert agreement_level(read(path, cwd), read(SPELLINGS[0], cwd)) == "exact"


def test_other_letters_are_another_name_of_the_same_file_on_a_drive_alone():
    pair = ("SRC\\Cart.py", "src/cart.py")
    assert agreement_level(*(read(path, DRIVE) for path in pair)) == "effect"
    assert agreement_level(*(read(path.replace("\\", "/"), POSIX) for path in pair)) == "tool"


def test_places_outside_stay_apart():
    assert absolute("D:\\data\\x.csv", DRIVE) == "D:/data/x.csv"
    assert absolute("..\\other\\x.py", DRIVE) == "C:/Users/ada/other/x.py"
    assert absolute("\\\\server\\share\\x.py", DRIVE) == "//server/share/x.py"
    assert absolute("/tmp/x", DRIVE) == "/tmp/x"
    assert absolute("/c/x", POSIX) == "/c/x"
    assert absolute("C:\\Users\\ada\\x.py", "/mnt/c/Users/ada/shop") == "/mnt/c/Users/ada/x.py"
    assert home_of(DRIVE) == "C:/Users/ada"


def test_a_cd_into_the_folder_itself_is_needless_in_every_spelling():
    for folder in (f'"{DRIVE}"', "/c/Users/ada/shop", "'c:/users/ada/shop'"):
        assert without_needless_cd(f"cd {folder} && git status", DRIVE) == "git status"
    assert without_needless_cd("cd /c/Users/ada && git status", DRIVE).startswith("cd")


@pytest.mark.parametrize("written", [f"{DRIVE}\\README.md", "C:/Users/ada/shop/README.md"])
def test_the_native_form_writes_paths_as_the_session_does(written):
    form = NativeForm([call("Read", file_path=written)], None, DRIVE)
    for path in SPELLINGS:
        (made,) = form.message(read(path, DRIVE))["tool_calls"]
        shown = json.loads(made["function"]["arguments"])["file_path"]
        assert shown == written.replace(
            "README.md", "src\\cart.py" if "\\" in written else "src/cart.py"
        )
