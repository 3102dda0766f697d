"""Decide whether a user's own words ask for a consequence, such as a push.

"Commit and push", "can you open a PR?" ask; "the last commit", "before you push", "don't commit"
and "push notifications" do not. In doubt, nobody asked. One pair less does less harm than a dataset
that teaches unwanted pushes.
"""

import re
from collections.abc import Mapping
from importlib import resources

import msgspec

_POLITE = r"(?:(?:please|also|now|just|then|finally|simply|directly|quickly|completely|entirely|fully|all|go ahead and|try to|to)\s+)*"
_LEAD = (
    r"(?:^|[.!?]\s+|[;:,(\n*•–—>\"“&+]\s*|(?<=\s)-\s+|\d[.)]\s+|(?:^|\s)/|\b(?:and|then|please|pls|now|also|just|or|ok|okay"
    r"|yes|yep|yeah|sure|great|next|finally|afterwards?|lastly|first|so|let['’]?s|let us|go ahead|go|feel free to"
    r"|(?:can|could|would|will|should|may|might) (?:you|we|i ask you to)|shall we|you (?:can|may|should|could|must|need to|have to)"
    r"|we (?:should|can|must|need to|have to)|(?:i|we)(?:['’]?d| would)? (?:also )?(?:want|like|need|prefer) (?:you )?to"
    r"|(?:i|we)(?:['’]?d| would)? (?:want|like|need) you to|forget to|be sure to|make sure (?:to|you|we)|remember to"
    r"|(?:ready|time|safe|free|fine|ok|okay|good) to|have you|commit|push|add|stage|test|tests|build|it|them|this|done)[\s,]+)"
)
_MAKE = r"(?:make|create|open|raise|do|submit|send|prepare|put up|file|cut|draft|write|publish|update|tag|get|need|want)"
_NOT_MEANT = re.compile(
    r"(?:\b(?:don['’]?t|do not|never|not|without|no|avoid|before|until|unless|how|why|whether|whenever|instead of"
    r"|rather than|stop|refrain|did|does|do i|do we|was|were|has|had|who|what|which|would have|wait|nobody|cannot|can['’]t"
    r"|shouldn['’]?t|won['’]?t|mustn['’]?t|needn['’]?t)\b"
    r"|\b(?:when|once|after|if)\b(?![^.,!?\n;]*\b(?:done|finish\w*|ready|complete\w*|works?|pass\w*|good|green|fixed|fine|ok|happy)\b))"
    r"[^.,!?\n;]*$"
)
_TAKEN_BACK = re.compile(
    r"^[^.!?\n;]{0,40}\b(?:is|are) (?:not (?:needed|wanted)|forbidden|off limits)"
)
_BEHAVES = (
    r"[- ](?:fails?|failed|failing|errors?|returns?|gives|works?|worked|does|doesn|broken|broke|breaks|hangs|throws"
    r"|behaves|took|takes|command|feature|is\b|was\b|isn|wasn|should|would|will|must not)"
)
"""What does not follow a verb that asks: then something is told of it."""
_CLAUSE = 200
"""Characters before a verb that are looked at for what takes it back."""
_AGREES = re.compile(
    r"\s*(?:yes|yep|yeah|y|ok|okay|sure|please|please do|go|go ahead|do it|do that|proceed|sounds good|perfect|great"
    r"|lgtm|approved|confirmed?|continue|absolutely|of course|make it so)\b[^?]{0,40}$"
)


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    verbs: str
    not_before: str = r"(?!)"
    made: str = ""
    named: str = ""
    also: tuple[str, ...] = ()


def _compiled(words: _Words) -> re.Pattern[str]:
    ways = [rf"{_LEAD}{_POLITE}(?P<verb>(?:{words.verbs})(?!{words.not_before})(?!{_BEHAVES})\b)"]
    if words.made:
        ways.append(rf"{_LEAD}{_POLITE}(?P<make>{_MAKE}\s+(?:[\w#'’-]+\s+){{0,4}}?{words.made})")
        ways.append(rf"(?P<wish>\b{words.made}[,]? (?:please|pls)\b)")
    if words.named:
        ways.append(rf"(?P<named>{words.named})")
    return re.compile("|".join(ways))


_WORDS: Mapping[str, _Words] = msgspec.toml.decode(
    (resources.files("replay_pipeline.judge") / "requests.toml").read_bytes(),
    type=dict[str, _Words],
)
_PATTERNS = {kind: _compiled(words) for kind, words in _WORDS.items()}


def asks_for(words: str, kind: str) -> bool:
    """Return whether a text asks for a kind of consequence.

    Args:
        words: the user's own text, without the client's additions.
        kind: kind of consequence, such as `push`. For an unknown kind, the result is false.
    """
    words = words.lower()
    return any(_asks(words, each) for each in (kind, *_also(kind)))


def agrees_to(words: str, proposal: str, kind: str) -> bool:
    """Return whether a short answer accepts a proposal, such as "Shall I push?"."""
    if not _AGREES.match(words.lower()):
        return False
    last = proposal.rstrip().lower()[-400:]
    pattern = rf"\b(?:{'|'.join(_WORDS[each].verbs for each in (kind, *_also(kind)))})\b"
    return kind in _WORDS and last.endswith("?") and re.search(pattern, last) is not None


def _also(kind: str) -> tuple[str, ...]:
    return _WORDS[kind].also if kind in _WORDS else ()


def _asks(words: str, kind: str) -> bool:
    pattern = _PATTERNS.get(kind)
    return pattern is not None and any(
        not _NOT_MEANT.search(words[max(0, (at := _start(found)) - _CLAUSE) : at])
        and not _TAKEN_BACK.match(words[found.end() :])
        for found in pattern.finditer(words)
    )


def _start(found: re.Match[str]) -> int:
    """Return where the words that ask begin, behind what leads to them."""
    return next(found.start(name) for name, text in found.groupdict().items() if text is not None)
