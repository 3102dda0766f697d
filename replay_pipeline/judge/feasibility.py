"""Judge actions at one prompt: are they possible, already done, or not asked for?

Each side of a pair must be possible at its prompt, both at extraction and after a cut of the
prompt. The rules look only at the prompt, so the same judge works in both places.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import msgspec

from replay_pipeline.actions import Action, Call
from replay_pipeline.actions.canonical import MalformedCallError, canonical_call
from replay_pipeline.actions.consequences import (
    Consequence,
    acts_of_name,
    consequence_of_tool,
    says,
)
from replay_pipeline.actions.edits import Edit
from replay_pipeline.actions.keys import bare, consequence_of, depend, keys_of, plan_of, reach_of
from replay_pipeline.actions.paths import absolute
from replay_pipeline.actions.windows import CLEARED_RESULT
from replay_pipeline.judge.asked import agrees_to, asks_for, own_words, typed_words
from replay_pipeline.judge.known_files import (
    CHANGED_BY_OTHERS,
    Files,
    file_path_of,
    may_change,
    replacements,
)
from replay_pipeline.types import Message, Tool

ObstacleKind = Literal["infeasible", "applied", "repeated_look", "repeated", "unasked"]

_NEED_A_FILE = {
    "Read": "file_path",
    "Edit": "file_path",
    "MultiEdit": "file_path",
    "NotebookEdit": "notebook_path",
}
"""Tools that act on a file that is there already, and the argument that names it."""
_DELEGATES = frozenset({"Task", "Agent"})
"""Tools that have a subagent work, which may change any file; those of `_LOOKING` only look."""
_LOOKING = frozenset({"explore", "plan"})
_DELEGATED = (
    *("commit", "push", "force", "merge", "rewrite", "tag"),
    *("discard", "publish", "deploy", "data", "pay"),
)
"""Consequences that a subagent may be told to have; what else its task says is about the code."""
_N_RECENT = 8
"""Calls back to which a look counts as a repetition."""
_N_AGAIN = 40
"""Calls back to which anything else counts as done already."""
_N_TRIES = 4
"""Commands of one program that failed in a row after which one more is no better."""
_FILE_CHANGES = frozenset({"Edit", "MultiEdit", "Write", "NotebookEdit"})
"""Tools whose repetition is judged by the file."""
_OF_FILES = frozenset({"Read", "Grep", "Glob", "LS", "NotebookRead"})
_QUESTIONS = frozenset({"AskUserQuestion", "ask_followup_question"})
_ANY_ANSWER = frozenset(
    {"yes", "no", "both", "all", "none", "other", "skip", "continue", "cancel", "proceed"}
)
_TELLING_CHARS = 5
"""Letters of an offered answer that somebody does not say by chance."""
_PLACE = re.compile(r"(?:ls|pwd)(?: -\w+)*")
_OF_THE_MACHINE = {
    r"whoami|id|groups": r"permission|denied|sudo|\bchown|owner|as root",
    r"date|cal": r"\bdates?\b|today|time ?zone|\byear|clock|expire|schedul|\bcron|timestamp",
    r"uname|hostname|arch|lsb_release|sw_vers": r"linux|kernel|architect|platform|arm64|x86|exec format|macos|darwin|distro|\bos\b|host",
    r"uptime|free|nproc|lscpu|vmstat|top|htop": r"memory|\boom\b|killed|\bcpu|cores?\b|slow|\bload|thread|parallel|worker|\bram\b",
    r"git (?:status|log|branch|remote)\b.*": r"\bgit|commit|branch|\brepo|clone|diff|merge|revert",
    _PLACE.pattern: r"no such file|not found|cannot (?:access|find|stat|open)|not exist|enoent|extracted|unzip|unpack",
    r"df": r"\bspace|disk|quota|storage|\bmount",
    r"env|printenv|set|export": r"\benv|environment|\$path\b|credential|api.?key|token",
    r"pip3? (?:list|freeze)|python3? -m pip (?:list|freeze)|conda list|npm (?:ls|list)|gem list|brew list": r"install|package|module|depend|version|import",
    r"\S+ (?:--version|-V|-v|version)": r"version|no module|incompat|unsupported|deprecat|requires? (?:python|node)|syntaxerror",
}
"""Commands that show the machine, and what makes them a look at the task where it was said of late."""
_SCRIPT = re.compile(
    r"(?:\b(?:python[\d.]*|node|ruby|php|bash|sh|perl)\s+|(?:^|[;&|]\s*)\./)(?![^\s;|&]*[$*{])([\w./~-]*\.(?:py|js|mjs|ts|rb|php|sh|pl))\b"
)
"""A script that a command runs."""
_CLAIMS = re.compile(
    r"\b(?:all done|tests? (?:all )?pass|is (?:fixed|done|complete|in place)|works? (?:now|as expected)|successfully)\b",
    re.IGNORECASE,
)
_CLAIMS_TESTS = re.compile(r"\btests? (?:now |all )*pass", re.IGNORECASE)
_DENIES = re.compile(
    r"exit code [1-9]|traceback \(most recent|\berror:|\b[1-9]\d* (?:failed|errors?)\b|^FAILED|panicked at",
    re.IGNORECASE | re.MULTILINE,
)
_STEPS = re.compile(r"&&|\|\||[;\n]")
_DOES_NOTHING = re.compile(r"(?:\s*(?::(?:\s[^\n]*)?|true|#[^\n]*|echo\b[^\n|>&;$`]*)\s*)+")
_SHOWS_LESS = re.compile(r"(?:head|tail|sort|wc|grep|echo|true|cat)\b")
_GENERIC = re.compile(
    r"(?:\W*\b(?:a|all|an|analyze|and|any|approach|back|be|bugs?|can|check|code|codebase|complete|continue|do|done|everything"
    r"|explore|features?|files?|find|finish|fix|first|for|full|go|how|i|implement|in|into|investigate|is|issues?|it|like|look|make|me|necessary|next"
    r"|need(?:s|ed)?|of|on|option|out|overall|please|prefer|problems?|proceed|project|report|repo(?:sitory)?|review|rest|should|simple|solve|structure"
    r"|summar\w+|tasks?|that|the|them|then|this|through|to|understand|up|want|what(?:ever)?|which|whole|with|work|would|wrong|you)\b)+\W*"
)
"""Words of which none says anything of a task."""
_ASKS_LEAVE = re.compile(
    r"\b(?:should|shall|may|can|could) (?:i|we)\b|\b(?:do you want|would you like) me to\b"
    r"|\b(?:which|what)\b.*\b(?:would you like|do you want)\b",
    re.IGNORECASE,
)
_WORTH_A_QUESTION = re.compile(
    r"\b(?:commit|push|deploy|merge|delet|remov|publish|release|drop|reset|revert|overwrit|pull request|pr\b|pay|send)",
    re.IGNORECASE,
)
"""What nobody should do without leave."""
_WANTS_QUESTIONS = re.compile(
    r"\b(?:ask|confirm|check) (?:with )?(?:me|us|first)\b|\bbefore (?:you )?(?:start|implement|chang|edit)|question|approv",
    re.IGNORECASE,
)
_MOST_QUESTION = 300
"""Characters up to which a text is a mere question; a longer one reports something."""
_OF_LATE = 6
"""Messages back to which the reason for a look at the machine is looked for."""
_OF_THE_WORLD = frozenset({"WebFetch", "WebSearch", "AskUserQuestion"})
"""Tools whose result no other call changes."""
_POLLS = re.compile(
    r"TaskOutput|BashOutput|AgentOutputTool|TaskGet|TaskList|Monitor|mcp__\w*(?:status|run|job|build|deployment)\w*"
    r"|Bash .*\b(?:sleep|watch|wait|tail|gh (?:run|pr checks)|glab ci|kubectl|docker|ps|pgrep|lsof|curl|jobs|nvidia-smi|squeue)\b",
    re.DOTALL | re.IGNORECASE,
)
"""Calls that ask how far something is that goes on by itself."""
_IS_OVER = re.compile(
    r"\b(?:completed|success\w*|failed|failure|finished|exited|exit code|passed|cancelled|conclusion)\b",
    re.IGNORECASE,
)
_TRY_AGAIN = re.compile(
    r"try again|retry|rate.?limit|timed? ?out|temporar|unavailable|overloaded|connection|\b(?:429|502|503|529)\b|in progress|not ready|stale",
    re.IGNORECASE,
)
_STARTS = re.compile(
    r"(?<!&)&\s*(?:$|\n|\w)|\bnohup\b|\b(?:run|npm|pnpm|yarn) (?:dev|start|serve)\b|docker(?: compose|-compose)? (?:run|up|start)\b|--detach|http\.server"
)
"""What stands in a command that leaves a process running."""
_PLANS = re.compile(
    r"[Pp]lan mode is active|[Pp]lan mode still active|You are (?:now )?in plan mode"
)
_PLANNED = re.compile(r"[Ee]xited [Pp]lan [Mm]ode|no longer in plan mode|has approved your plan")
_A_PLAN = re.compile(r"/plans?/[^/]+\.md$")
_FAILED = re.compile(
    r"\s*(?:<tool_use_error>|error\b|exit code [1-9]|string to replace not found|found \d+ matches"
    r"|file (?:has not been read|does not exist)|no changes to make|the user doesn|user rejected"
    r"|\[request interrupted|permission|inputvalidationerror|enoent|eacces|cancelled:)",
    re.IGNORECASE,
)
_NAME_PARTS = re.compile(r"[a-z]{3,}|\d{2,}")
_CREATES = r"(?:>\s*|\b(?:touch|mkdir|tee|cp|mv|mktemp|clone)\b[^|;&\n]*[\s/]|-o\s+|--output[ =])[\w./~$-]*"
"""What stands before the name of a file in a command that makes it."""
_DELETING = (
    r"\b(?:delet|remov|rm\b|drop|get(?:ting)? rid|prun|clean|wip|uninstall|clear|destroy|throw)"
)
_DELETES = rf"{_DELETING}(?:(?!\b(?:from|inside|within) )[^.!?\n]){{0,100}}"
"""Words of a request to delete, up to what it names; what goes out of a file leaves the file."""
_TO_DELETE = re.compile(rf"{_DELETING}(?:[^.!?\n]|[.!?](?!\s)){{0,200}}")
"""A request to delete, to the end of its sentence. A point inside a name does not end it."""
_A_FILE = re.compile(r"/|[\w-]\.[a-z]\w{0,7}\b|\*")
"""What makes words the name of a file, and not a description such as "the stale ones"."""
_STANDING = re.compile(
    r"\b(?:always|each|every|whenever|from now on|as you go|along the way|regularly)\b"
)
_AGAIN = (
    r"\b(?:again|once more|re-?(?:read|check|view|load|fresh|visit|open)\w*|latest|current"
    r"|(?:i|we|they|he|she|it)(?:['’](?:ve|s)| have| has| was| is| did)?(?: just| already| now)? (?:chang|updat|edit|fix|pull|push|merg"
    r"|committ|revert|modifi|rebas|add|remov|mov|renam|replac|delet|restart|restor|stash|switch)ed\b"
    r"|(?:i|we|they|he|she)(?:['’]ve| have)?(?: just| already)? (?:wrote|written|undid|undone|put)\b)"
)
_FILES_AGAIN = re.compile(_AGAIN, re.IGNORECASE)
"""Words of a user that give a reason to look at a file again that was just shown: that it may be another one now."""
_ANYTHING_AGAIN = re.compile(
    rf"{_AGAIN}|\b(?:now|look|check|review|see|read|open|find|search|where|what|which|why|how|who|explain|show|list|print|tell"
    r"|describe|summar\w+|run|try|test)\b",
    re.IGNORECASE,
)
"""Words of a user that give a reason to do something again; a mere "go on" gives none."""
_TEMPORARY = ("/tmp/", "/private/tmp/", "/var/folders/", "/var/tmp/", "/dev/")
_CWD = re.compile(
    r"^(?:\s*- |\s*)(?:Primary w|W)orking directory: ((?:/|[A-Za-z]:[\\/]|\\\\).*)$", re.MULTILINE
)


class Obstacle(NamedTuple):
    """The reason why an action can't work at a state."""

    kind: ObstacleKind
    why: str


class Done(NamedTuple):
    """A call of the prompt, with its answer."""

    call: Call
    place: int
    """Index of the message that answers it, or of the call if nothing does."""
    answer: str
    has_failed: bool


def cwd_of(messages: Sequence[Message]) -> str | None:
    """Return the working directory that the first message names, if any."""
    content = messages[0].get("content") if messages else None
    found = _CWD.search(content) if isinstance(content, str) else None
    return found[1].strip() if found else None


class PromptState:
    """The facts that a prompt shows, and the calls made in it. Computed when first used.

    Args:
        messages: the prompt.
        student: the recorded action. Its files count as named, since logs lack the student's system
            prompt, and its consequences need no request.
        cwd: folder that relative paths are read against. By default, the one in the prompt.
        typed: what the person typed, as the log tells it. By default, what the client has not marked
            as its own.
        tools: the tools' definitions, for what servers say of them.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        student: Action | None = None,
        *,
        cwd: str | None = None,
        typed: Sequence[str] | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self._tools = tools or ()
        self._by_person = typed
        self._messages = messages
        self._student = student
        self._cwd = cwd or cwd_of(messages)

    @cached_property
    def texts(self) -> list[str]:
        """Return all texts of each message, with unescaped call arguments."""
        return ["\n".join(texts_in(_opened(message))) for message in self._messages]

    @cached_property
    def text(self) -> str:
        """Return all texts of the messages as one."""
        return "\n".join(self.texts)

    @cached_property
    def done(self) -> list[Done]:
        """Return the calls of the prompt, in order, with their answers."""
        answers = {
            message.get("tool_call_id"): (place, self.texts[place])
            for place, message in enumerate(self._messages)
            if message.get("role") == "tool"
        }
        found: list[Done] = []
        for place, message in enumerate(self._messages):
            for given in message.get("tool_calls") or ():
                function = given.get("function") or {}
                try:
                    call = canonical_call(
                        function.get("name"), function.get("arguments"), cwd=self._cwd
                    )
                except MalformedCallError:
                    continue
                at, answer = answers.get(given.get("id"), (place, ""))
                found.append(Done(call, at, answer, _FAILED.match(answer) is not None))
        return found

    @cached_property
    def files(self) -> Files:
        """Return the known contents of files at this point."""
        found = Files()
        users = [i for i, message in enumerate(self._messages) if message.get("role") == "user"]
        for done in self.done:
            while users and users[0] < done.place:
                found.told(self.texts[users.pop(0)])
            if not done.has_failed:
                found.take(done.call, done.answer)
        for place in users:
            found.told(self.texts[place])
        return found

    def obstacle(self, action: Action) -> Obstacle | None:
        """Return the reason why an action can't work here, or `None`."""
        if why := self.impossible(action) or self._unplanned(action):
            return Obstacle("infeasible", why)
        found = self.stale(action) or self.repeated(action)
        if found is not None:
            return found
        kinds = sorted(self.unasked(action))
        return Obstacle("unasked", f"nobody asked for: {', '.join(kinds)}") if kinds else None

    def needless(self, action: Action) -> str | None:
        """Return why an action teaches nothing here, or `None`.

        It is bookkeeping alone, does nothing, asks what is answered or what nobody has to be asked, hands on a
        task without saying which, or looks at the machine where nothing was said of it.
        """
        if action.calls and all(self._consequence(call).is_note for call in action.calls):
            return "bookkeeping alone"
        if not action.calls and self._asks_leave(action.text):
            return "a question that nobody has to be asked"
        last = self.done[-1].answer if self.done else ""
        if not action.calls and _CLAIMS.search(action.text) and _DENIES.search(last):
            return "it claims what the last answer denies"
        if not action.calls and _CLAIMS_TESTS.search(action.text) and not self._has_run_something:
            return "it claims what nobody has tried"
        if any(map(_is_vague, action.calls)):
            return "a task or a question that says nothing of what it is about"
        commands = [str(each.values().get("command", "")) for each in action.calls]
        if any(commands) and all(map(_DOES_NOTHING.fullmatch, commands)):
            return "a command that does nothing"
        if action.calls and all(map(self._is_beside_the_task, action.calls)):
            return "a look at the machine, of which nothing was said"
        said = self._all_typed.lower()
        for call in action.calls:
            if call.name in _QUESTIONS and any(
                _stands_in(option, said) for option in _options(call)
            ):
                return "the answer stands in the prompt"
        return None

    @cached_property
    def _has_run_something(self) -> bool:
        """Has the agent run a command since the person spoke last?"""
        places = (n for n, each in enumerate(self._messages) if each.get("role") == "user")
        spoken = [n for n in places if own_words(self._typed(n)).strip()]
        since = spoken[-1] if spoken else 0
        return any(
            done.place > since and (done.call.name == "Bash" or done.call.name in _DELEGATES)
            for done in self.done
        )

    def _asks_leave(self, text: str) -> bool:
        """Return whether a text only asks whether or where to go on with what the person asked for."""
        text = text.strip()
        sentences = re.split(r"(?<=[.!?:])\s+", text)
        return (
            text.endswith("?")
            and len(text) <= _MOST_QUESTION
            and _ASKS_LEAVE.search(sentences[-1]) is not None
            and not _WORTH_A_QUESTION.search(sentences[-1])
            and not _WANTS_QUESTIONS.search(self._all_typed)
            and not self._is_planning
        )

    @cached_property
    def _all_typed(self) -> str:
        places = (n for n, each in enumerate(self._messages) if each.get("role") == "user")
        return "\n".join(own_words(self._typed(place)) for place in places)

    def _is_beside_the_task(self, call: Call) -> bool:
        """Return whether a command only shows the machine, and neither the person nor a late answer gives a reason."""
        if call.name != "Bash":
            return False
        shown = [
            text
            for text, message in zip(self.texts, self._messages, strict=True)
            if message.get("role") in ("assistant", "tool")
        ]
        late = "\n".join([self._all_typed, *shown[-_OF_LATE:]]).lower()
        steps = [step.strip() for step in _STEPS.split(str(call.values().get("command", "")))]
        parts = [step.partition("|") for step in steps if step and not step.startswith("echo ")]
        if not self.done and any(_PLACE.fullmatch(command.strip()) for command, *_ in parts):
            return False  # somebody who comes in looks where he is
        return bool(parts) and all(
            _shows_the_machine(command.strip(), late)
            and all(_SHOWS_LESS.match(each.strip()) for each in rest.split("|") if rest)
            for command, _, rest in parts
        )

    def impossible(self, action: Action) -> str | None:
        """Return the first name or text that an action needs and the prompt never showed, or `None`.

        The prompt must have named each file that the action reads or changes, and must have shown
        each line of the text that an edit replaces. Lines are compared one by one, because results
        number and indent them.
        """
        written: set[str] = set()
        for call in action.calls:
            if call.name == "Bash" and (name := self._unknown_script(call, action)):
                return f"{name} was never named"
            if (key := _NEED_A_FILE.get(call.name)) is None:
                continue
            name = PurePosixPath(call.values()[key].replace("\\", "/")).name
            known_to_student = self._student is not None and name in self._student.render()
            if name not in self.text and not known_to_student:
                return f"{name} was never named"
            for _, edits in replacements([call]):
                for edit in edits:
                    if any(line not in self.text and line not in written for line in _lines(edit)):
                        return f"the text that is replaced in {name} was never shown"
                    written.update(map(str.strip, edit.new.splitlines()))
        return None

    def _unknown_script(self, call: Call, action: Action) -> str | None:
        """Return the name of a script that a command runs and that nobody has named or made."""
        for path in _SCRIPT.findall(str(call.values().get("command", ""))):
            name = PurePosixPath(path).name
            known = (self.text, self._student.render() if self._student is not None else "")
            if action.render().count(name) < 2 and not any(name in each for each in known):
                return name
        return None

    def stale(self, action: Action) -> Obstacle | None:
        """Return why an edit is pointless: it is already made, or the text that it replaces no longer exists."""
        own: set[str] = set()
        for call in action.calls:
            path = file_path_of(call)
            if path is None:
                continue
            name = PurePosixPath(path).name
            if call.name == "Write":
                content = call.values().get("content")
                file = self.files[path]
                if content and (content == file.content or content in file.written):
                    return Obstacle("applied", f"{name} holds that already")
            for _, edits in replacements([call]):
                for edit in edits:
                    if path in own:
                        break  # what its own earlier calls leave is not followed
                    found = self.files[path].obstacle(edit)
                    if found == "applied":
                        return Obstacle("applied", f"the change of {name} is made already")
                    if found == "gone":
                        return Obstacle(
                            "infeasible", f"the text that is replaced in {name} is gone"
                        )
                    own.add(path)
        return None

    def repeated(self, action: Action) -> Obstacle | None:
        """Return whether an action only does again what was done, and nothing has changed since."""
        if not action.calls or not all(
            self._is_repeated(call) if reach_of(call) == "look" else self._is_done_again(call)
            for call in action.calls
        ):
            return None
        if all(reach_of(call) == "look" for call in action.calls):
            return Obstacle("repeated_look", "it was shown already, and nothing changed since")
        return Obstacle("repeated", "it was done already, and nothing changed since")

    def _is_done_again(self, call: Call) -> bool:
        """Return whether a call that is no look was made with the same effect, and must not be made again."""
        if call.name in _FILE_CHANGES:
            return False
        if self._n_failed_like(call) >= _N_TRIES:
            return True
        for done in reversed(self.done[-_N_AGAIN:]):
            if done.place < self._last_word:
                return False
            if done.call.name == call.name and (
                keys_of(done.call) == keys_of(call) or _has_checked(done, call)
            ):
                is_refused = done.has_failed and not done.answer.lower().startswith("exit code")
                return not (is_refused or _goes_on(done))
            if not done.has_failed and _changes_what_is_done(done.call, call):
                return False
        return False

    def _n_failed_like(self, call: Call) -> int:
        """Return how many commands of the same program have failed in a row, with nothing mended in between."""
        n_failed = 0
        for done in reversed(self.done[-_N_AGAIN:]):
            if done.place < self._last_word:
                break
            if done.call.name in _FILE_CHANGES and not done.has_failed:
                break
            if call.name == done.call.name == "Bash" and _program(call) == _program(done.call):
                if not (done.has_failed or _DENIES.search(done.answer)):
                    break
                n_failed += 1
        return n_failed

    def _unplanned(self, action: Action) -> str | None:
        """Return why a call may not be made while the agent plans, or `None`."""
        if not self._is_planning:
            return None
        for call in action.calls:
            is_plan = call.name in _FILE_CHANGES and _A_PLAN.search(file_path_of(call) or "")
            found = self._consequence(call)
            is_quiet = found.only_looks or found.is_note or reach_of(call) in ("look", "nothing")
            if not (is_plan or (is_quiet and not self._acts(call))):
                return f"{call.name} is not for plan mode"
        return None

    @cached_property
    def _is_planning(self) -> bool:
        """Is the client in plan mode at the end of the prompt?"""
        entered = {
            done.place
            for done in self.done
            if done.call.name == "EnterPlanMode" and not done.has_failed
        }
        for place in range(len(self.texts) - 1, -1, -1):
            if self._messages[place].get("role") != "assistant":
                if _PLANNED.search(self.texts[place]):
                    return False
                if place in entered or _PLANS.search(self.texts[place]):
                    return True
        return False

    def _is_repeated(self, look: Call) -> bool:
        last_word = self._last_word
        if look.name in _OF_FILES:
            name = PurePosixPath(str(look.values().get("file_path", ""))).name
            last_word = self._last_reason(_FILES_AGAIN, name)
        for done in reversed(self.done[-_N_RECENT:]):
            if done.place < last_word:
                return False
            if _shows_again(look, done):
                return not _goes_on(done)
            # A change that failed is a reason to look again: what was shown did not hold.
            is_reason = reach_of(done.call) == "object" if done.has_failed else True
            if is_reason and _changes_what_is_seen(done.call, look):
                return False
        return False

    @cached_property
    def _last_word(self) -> int:
        """Place of the last word of the user that gives a reason to do something again."""
        return self._last_reason(_ANYTHING_AGAIN)

    def _last_reason(self, reasons: re.Pattern[str], name: str = "") -> int:
        """Return the place of the last word of the user with one of these reasons, or with a name."""
        for place in range(len(self._messages) - 1, 0, -1):
            if self._messages[place].get("role") != "user":
                continue
            typed = self._typed(place)
            if reasons.search(typed) or (name and name in typed):
                return place
            if CHANGED_BY_OTHERS.search(self.texts[place]):
                return place
        return 0

    def unasked(self, action: Action) -> set[str]:
        """Return the kinds of an action's consequences that nobody asked for.

        What the recorded action does too is no difference between the sides.
        """
        agent = self._student.calls if self._student is not None else ()
        excused = {(kind, _object(each)) for each in agent for kind in self._acts(each)}
        deleted = {path for call in agent for path in _deleted_by(call)}
        return {
            kind
            for call in action.calls
            for kind in self._acts(call)
            if not (
                deleted.issuperset(paths)
                if (paths := _deleted_by(call))
                else (kind, _object(call)) in excused
            )
            if self._request_for(kind, call) is None
        }

    def _request_for(self, kind: str, call: Call) -> int | None:
        """Return the place of the request behind a consequence; one to delete names what is deleted."""
        place = self.request_place(kind, _deleted_by(call) if kind == "delete" else ())
        if place is None and call.name not in ("Bash", *_DELEGATES):
            place = self._place_that_names(call)
        return place

    def _place_that_names(self, call: Call) -> int | None:
        """Return the place of the last message in which the person names a tool by what it does."""
        for place in range(len(self._messages) - 1, -1, -1):
            if self._messages[place].get("role") == "user" and says(
                own_words(self._typed(place)), call.name
            ):
                return place
        return None

    def _consequence(self, call: Call) -> Consequence:
        told = self._annotations.get(call.name)
        return consequence_of_tool(call.name, call.values(), told) if told else consequence_of(call)

    @cached_property
    def _annotations(self) -> dict[str, dict[str, Any]]:
        """Return what servers say of their tools, by tool."""
        told = {}
        for tool in self._tools:
            function = tool.get("function", tool)
            said = tool.get("annotations") or function.get("annotations")
            if isinstance(said, dict):
                told[str(function.get("name"))] = said
        return told

    def _acts(self, call: Call) -> set[str]:
        """Return the kinds of a call's consequences, without those on what the agent made itself."""
        acts = set(self._consequence(call).acts)
        values = call.values()
        if call.name in _DELEGATES:
            is_look = str(values.get("subagent_type", "")).lower() in _LOOKING
            task = own_words(str(values.get("prompt", "")))
            return set() if is_look else {kind for kind in _DELEGATED if asks_for(task, kind)}
        if call.name in ("Skill", "SlashCommand"):
            name = str(values.get("skill") or values.get("command") or "")
            return set(acts_of_name(name.split()[0].rpartition(":")[2] if name.split() else ""))
        deleted = _deleted_by(call)
        if deleted and all(map(self._is_own, deleted)):
            acts.discard("delete")
        if call.name == "Bash" and "git stash pop" in str(values.get("command")):
            acts.discard("discard")  # what is put away for a moment comes back
        if "stop" in acts and any(_has_started(done) for done in self.done):
            acts.discard("stop")
        return acts

    def _is_own(self, path: str) -> bool:
        """Return whether the agent made what it deletes, in this prompt."""
        name = PurePosixPath(path).name
        if path.startswith(_TEMPORARY):
            return True
        if not name or name.lower() in self._all_typed.lower():
            return False  # what the person speaks of is not the agent's alone
        for done in self.done:
            is_of_it = (file_path_of(done.call) or "").endswith(name)
            if is_of_it or (done.call.name == "Bash" and self._makes(done, name)):
                # The first that was done with it: a client overwrites nothing that was not read.
                return done.call.name in ("Bash", "Write") and not done.has_failed
        return False

    @staticmethod
    def _makes(done: Done, name: str) -> bool:
        return re.search(_CREATES + re.escape(name), done.call.values()["command"]) is not None

    def request_place(self, kind: str, paths: Sequence[str] = ()) -> int | None:
        """Return the index of the last user message that asks for a kind of consequence.

        Args:
            kind: kind of consequence, such as `push`.
            paths: the objects of the consequence. The message, or the proposal that it accepts,
                must contain a part of each name, or describe what it lists ("delete the stale one").

        A request ends when it is carried out, unless it is a standing one ("commit after each
        step").
        """
        spoke = False
        carried_out = [
            done.place
            for done in self.done
            if not done.has_failed and kind in self._consequence(done.call).acts
        ]
        next_word = len(self._messages)
        for place in range(len(self._messages) - 1, -1, -1):
            if self._messages[place].get("role") != "user":
                continue
            shown = self._typed(place)
            words = own_words(shown).lower()
            if not words.strip():
                continue
            before = self.texts[place - 1] if place else ""
            agrees = agrees_to(words, before, kind)
            said = f"{before.lower()} {words}" if agrees else words
            asks = agrees or asks_for(words, kind)
            if asks and all(_is_named(p, said) or _is_described(p, said, shown) for p in paths):
                is_over = spoke and any(place < at < next_word for at in carried_out)
                return None if is_over and not _STANDING.search(words) else place
            spoke, next_word = True, place
        return None

    def _typed(self, place: int) -> str:
        """Return what the person typed of a message of the user."""
        return typed_words(self.texts[place], self._by_person)

    def needed(self, action: Action) -> set[int]:
        """Return the indexes of the messages that make an action possible here.

        For each needed fact this is the latest message that shows it, and for a request the message
        that asks.
        """
        found: set[int | None] = set()
        written: set[str] = set()
        for call in action.calls:
            if (key := _NEED_A_FILE.get(call.name)) is not None:
                name = PurePosixPath(call.values()[key].replace("\\", "/")).name
                found.add(self._last_with([name]))
                shown: set[int | None] = set()
                for _, edits in replacements([call]):
                    for edit in edits:
                        shown |= self._showing([x for x in _lines(edit) if x not in written])
                        written.update(map(str.strip, edit.new.splitlines()))
                first = min((place for place in shown if place is not None), default=None)
                found |= shown | self._changes_since(first, name)
            found |= {self._request_for(kind, call) for kind in self._acts(call)}
        return {place for place in found if place is not None}

    def _changes_since(self, place: int | None, name: str) -> set[int]:
        """Return the places of what changed a file after it was shown: without them it would look old."""
        return {
            done.place
            for done in self.done
            if place is not None and done.place > place and not done.has_failed
            if reach_of(done.call) == "object" and (file_path_of(done.call) or "").endswith(name)
        }

    def _showing(self, lines: list[str]) -> set[int | None]:
        if not lines:
            return set()
        whole = self._last_with(lines)
        return {whole} if whole is not None else {self._last_with([line]) for line in lines}

    def _last_with(self, parts: list[str]) -> int | None:
        for place in range(len(self.texts) - 1, -1, -1):
            text = self.texts[place]
            if all(part in text for part in parts):
                return place
        return None


def _shows_again(look: Call, done: Done) -> bool:
    """Return whether what a look would show stands in the answer of a call."""
    if look.name != done.call.name or done.answer.startswith(CLEARED_RESULT):
        return False
    if look == done.call:
        return True
    if look.name not in ("Read", "Bash"):
        return False
    ours, theirs = keys_of(look), keys_of(done.call)
    if ours.effect != theirs.effect:
        return False
    if theirs.lines is None or ours.lines is None:
        return theirs.lines is None
    return theirs.lines[0] <= ours.lines[0] and ours.lines[1] <= theirs.lines[1]


def _changes_what_is_seen(call: Call, look: Call) -> bool:
    if call.name in _DELEGATES:
        return str(call.values().get("subagent_type", "")).lower() not in _LOOKING
    if consequence_of(call).is_note:
        return False
    if call.name in _FILE_CHANGES and look.name in ("Grep", "Glob", "LS"):
        # An edit adds no file, and no change reaches out of the folder that is searched.
        path = absolute(file_path_of(call) or "", call.cwd)
        where = look.values().get("path")
        is_inside = where is None or f"{path}/".startswith(absolute(where, look.cwd) + "/")
        return is_inside and (look.name == "Grep" or call.name == "Write")
    if reach_of(call) == "anything" and look.name in ("Read", "NotebookRead"):
        path = file_path_of(look)
        return path is None or may_change(call, path)
    if call.name == "Bash" and look.name in ("Grep", "Glob", "LS") and plan_of(call).keeps_files:
        return False
    return depend(call, look)


def _goes_on(done: Done) -> bool:
    """Return whether a call's answer is a reason to make it again: what it asks for goes on, or it must be retried."""
    # A file may speak of retries: what it says is no answer of its tool.
    if (done.has_failed or done.call.name not in _OF_FILES) and _TRY_AGAIN.search(
        done.answer[:2_000]
    ):
        return True
    is_poll = _POLLS.match(f"{done.call.name} {done.call.values().get('command', '')}")
    return is_poll is not None and not _IS_OVER.search(done.answer)


def _changes_what_is_done(call: Call, again: Call) -> bool:
    """Return whether a call may be the reason to do something again."""
    if again.name in _OF_THE_WORLD:
        return False
    if again.name.startswith("mcp__"):
        is_same_server = call.name.split("__")[:2] == again.name.split("__")[:2]
        return is_same_server and reach_of(call) == "anything"
    if again.name == "TodoWrite":
        return call.name == "TodoWrite"
    return call.name in _DELEGATES or reach_of(call) in ("object", "anything")


def _shows_the_machine(command: str, late: str) -> bool:
    """Return whether a command shows what is so of the machine, for no reason among the late words."""
    for commands, reasons in _OF_THE_MACHINE.items():
        if re.fullmatch(rf"(?:{commands})(?: -\w+)*(?: 2>\S+)?", command):
            return not re.search(reasons, late) and not re.search(
                rf"\b{re.escape(command.split()[0].lower())}\b", late
            )
    return False


def _is_vague(call: Call) -> bool:
    """Return whether a subagent is given a task, or a person asked, in words that fit any task."""
    values = call.values()
    words = str(values.get("prompt", "")) if call.name in _DELEGATES else ""
    if call.name in _QUESTIONS:
        asked = values.get("questions") or [values]
        shown = (str(each.get("question", "")) for each in asked if isinstance(each, dict))
        words = " ".join([*shown, *_options(call)])
    return _GENERIC.fullmatch(words.lower()) is not None


def _options(call: Call) -> Iterator[str]:
    """Yield the answers that a question offers."""
    for question in call.values().get("questions") or (call.values(),):
        for option in question.get("options") or () if isinstance(question, dict) else ():
            label = option.get("label") if isinstance(option, dict) else option
            if isinstance(label, str):
                yield label


def _stands_in(option: str, said: str) -> bool:
    """Return whether a person has said already what a question offers: all words of it, one behind the other."""
    words = [
        re.escape(word) for word in re.findall(r"[^\W_]+", re.sub(r"\(.*?\)", "", option.lower()))
    ]
    is_telling = sum(map(len, words)) >= _TELLING_CHARS and bool({*words} - _ANY_ANSWER)
    return is_telling and re.search(r"\b" + r"\W+(?:\w+\W+)?".join(words) + r"\b", said) is not None


def _has_started(done: Done) -> bool:
    values = done.call.values()
    is_started = values.get("run_in_background") or _STARTS.search(str(values.get("command", "")))
    return bool(is_started) and not done.has_failed


def _program(call: Call) -> list[str]:
    """Return the program of a command with its subcommand."""
    return str(call.values().get("command")).split()[:2]


def _has_checked(done: Done, call: Call) -> bool:
    """Return whether a command ran well that shows only another part of the same output."""
    if call.name != "Bash" or done.has_failed or _DENIES.search(done.answer):
        return False
    return bare(call.values()["command"]) == bare(done.call.values()["command"])


def _object(call: Call) -> Any:
    """Return what a consequence is on, as far as two sides are compared by it."""
    if call.name != "Bash":
        return call.name if call.name not in _DELEGATES else "Bash"
    programs = plan_of(call).target or ()
    return (
        "Bash" if any(words and words[0] == "git" for words in programs) else keys_of(call).target
    )


def _deleted_by(call: Call) -> list[str]:
    """Return what a call deletes; an empty name where that is not plain."""
    if call.name != "Bash" or "delete" not in plan_of(call).acts:
        return []
    return list(_deleted(plan_of(call).target or ()))


def _is_named(path: str, words: str) -> bool:
    """Return whether words ask to delete a path by a part of its name; of one that is not plain nobody can tell."""
    name = PurePosixPath(path).name.lower()
    parts = _NAME_PARTS.findall(PurePosixPath(name).stem)
    named = "|".join([re.escape(name), *(rf"\b{part}" for part in parts)])
    before = _DELETES if re.search(_DELETING, words) else ""  # else it is asked in another language
    return not parts or re.search(f"{before}(?:{named})", words) is not None


def _is_described(path: str, words: str, shown: str) -> bool:
    """Return whether words ask to delete something without a name, and the same message lists the path.

    "Remove the one that nobody needs", below a list of files: which one that is, the agent has to find. A name
    inside a sentence or a traceback is no list.
    """
    name = re.escape(PurePosixPath(path).name)
    listed = rf"(?:^|\s|/){name}[\s\"'`)]*$|^[\s\"'`(*•-]*(?:[^\s:]*/)?{name}(?![\w.-])"
    is_one = any(not _A_FILE.search(request) for request in _TO_DELETE.findall(words))
    return bool(name) and is_one and re.search(listed, shown, re.MULTILINE) is not None


def _deleted(target: Sequence[Any]) -> Iterator[str]:
    """Yield the operands of the commands that delete files; an empty one where they are not plain."""
    for words in target:
        program = PurePosixPath(str(words[0])).name if words else ""
        if program in ("rm", "rmdir", "unlink", "shred", "truncate"):
            yield from (word for word in words[1:] if isinstance(word, str))
        elif words and (words[0] == "find" or words[:2] == ("git", "rm") or words[0] == "xargs"):
            yield ""


def _lines(edit: Edit) -> list[str]:
    return [line for line in map(str.strip, edit.old.splitlines()) if line]


def _opened(message: Message) -> list[Any]:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [message.get("content"), *(_arguments(call.get("arguments")) for call in calls)]


def _arguments(arguments: Any) -> Any:
    try:
        return msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments


def texts_in(value: Any) -> Iterator[str]:
    """Yield each text in a JSON value, without the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)
