"""Commands that count as equal do the same in a real bash: same words, order, files, status."""

import random
import subprocess
import sys
from collections import defaultdict

import pytest

from replay_pipeline.actions.shell import shell_plan

PIECES = (
    ["a", "b", "'a'", '"a"', "\\a", "a\\ b", "'a b'", '"a b"', "''", '""', "$x", "${x}", '"$x"']
    + ['"${x}"', "'$x'", "\\$x", '"\\$x"', "$y", "'$y'", "*", "'*'", '"*"', "\\*", "f?", "'f?'"]
    + ["[fg]1", "'[fg]1'", "{a,b}", "'{a,b}'", "~", "'~'", "a#b", "'#'", "\\\\", '"\\\\"', '"\\a"']
    + ["$(p s)", "`p s`", '"$(p s)"', '"`p s`"', "$((1+2))", "'$((1+2))'", "$'a\\tb'", "'a\\tb'"]
    + ['"$x  $y"', '"$x $y"', '" $x"', "-l", "-la", "--", "!", "'!'", "a=b", "${x:-z}", "$?"]
)
JOINS = [" ", "  ", "", " \\\n"]
BETWEEN = [" ; ", "\n", ";", " && ", " || ", " | ", " # c\n", " &> o; ", " > o 2>&1; ", " >> o; "]
AROUND = [
    *["{}"] * 12,
    "( {} )",
    "{{ {}\n}}",
    "! {}",
    "if {}\nthen p t; fi",
    "if {}\nthen p t\nelse q e; fi",
    "for i in $x b; do {}\ndone",
    "for i in $x b\ndo {}\ndone",
    "case a in a) {}\n;; esac",
    "[[ $x == a* ]] || {}",
    "[[ $x == 'a*' ]] || {}",
    "q <<E\n  h $x\nE\n{}",
    "q <<'E'\n  h $x\nE\n{}",
    "q <<F\n  h $x\nF\n{}",
    "q <<-E\n\th\n\tE\n{}",
    "q <<E | cat\nh\nE\n{}",
    "q <<F |cat\nh\nF\n{}",
    "q <<< $y; {}",
    'q <<< "$y"; {}',
    "2>&1 p a > o; {}",
    "p a > o 2>&1; {}",
    "p a &> o; {}",
    "p a 2>&1 > o; {}",
]
SETTING = ["", "x=2 ", "x=2 y=3 ", "y=3 x=2 ", 'x=2 y="$x" ', 'y="$x" x=2 ']


def made_up(draw):
    command = []
    for _ in range(draw.choice([1, 1, 2])):
        words = "".join(
            part
            for _ in range(draw.randrange(4))
            for part in (draw.choice(JOINS), draw.choice(PIECES))
        )
        command.append(draw.choice(SETTING) + draw.choice(["p ", "q "]) + words)
    joined = draw.choice(BETWEEN).join(command) + draw.choice(["", "", " # end"])
    return draw.choice(AROUND).format(joined) + draw.choice(["", "", "\n"])


def outputs(commands, folder):
    """What each command prints, writes and returns in a bash of its own."""
    here = folder / "here"
    here.mkdir()
    (here / "f1").write_text("")
    (here / "g1").write_text("")
    script = [
        "p() { printf 'p'; printf '<%s>' \"$@\"; printf '[%s,%s]' \"$x\" \"$y\"; }",
        "q() { printf 'q'; printf '<%s>' \"$@\"; cat; return 1; }",
        "x='1  2'; y='*'",
    ]
    for n, command in enumerate(commands):
        (folder / f"command.{n}").write_text(command + "\n")
        script.append(
            f"rm -f o; printf '\\n--{n}\\n'; "
            f"(source ../command.{n} </dev/null 2>/dev/null; printf '=%s' $?); "
            "if [ -e o ]; then cat o; fi"
        )
    (folder / "script").write_text("\n".join(script))
    done = subprocess.run(
        ["bash", "--norc", "../script"],
        cwd=here,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    parts = done.stdout.split("\n--")[1:]
    assert len(parts) == len(commands), done.stderr
    return [part.partition("\n")[2] for part in parts]


@pytest.mark.slow
def test_commands_with_equal_plans_do_the_same_in_bash(tmp_path):
    draw = random.Random(11)
    groups = defaultdict(set)
    for _ in range(5_000):
        command = made_up(draw)
        groups[shell_plan.__wrapped__(command, None).effect].add(command)
    shared = [sorted(group)[:4] for group in groups.values() if len(group) > 1]
    draw.shuffle(shared)
    shared = shared[:160]
    commands = [command for group in shared for command in group]
    found = iter(outputs(commands, tmp_path))
    wrong = []
    for group in shared:
        printed = {command: next(found) for command in group}
        if len(set(printed.values())) > 1:
            wrong.append(printed)
    assert len(shared) == 160
    assert not wrong, "\n".join(map(repr, wrong))


IN_THREADS = """
from threading import Thread

from replay_pipeline.actions.shell import parsed_plan


def read(thread):
    for number in range(150):
        one = f"echo '{thread} {number}' | grep -n {number} > out.txt && cat <<'EOF'\\nx {thread}\\nEOF\\n"
        parsed_plan(";".join([one] * (number % 11)), "/a")


threads = [Thread(target=read, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


IN_EVERY_SCRIPT = """
from replay_pipeline.actions.shell import parsed_plan

for code in range(0x80, 0x110000, 499):
    if not 0xD800 <= code < 0xE000:
        sign = chr(code)
        parsed_plan(f"t+h*{sign}{{{sign}:P {sign}=1 ${sign} $(({sign})) {sign}[0]=a", "/a")
"""


@pytest.mark.parametrize("program", [IN_THREADS, IN_EVERY_SCRIPT], ids=["threads", "scripts"])
def test_no_command_crashes_the_process(program):
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=300)
    assert done.returncode == 0


def test_a_sign_of_any_script_is_part_of_its_word():
    plan = shell_plan("echo 'a' 变量=1 > ü🎉.txt", "/a")
    assert plan.effect == shell_plan('echo "a"  变量=1 >ü🎉.txt', "/a").effect
    assert plan.effect != shell_plan("echo 'a' 变量=1 > ü🎈.txt", "/a").effect
