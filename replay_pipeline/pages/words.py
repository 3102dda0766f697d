"""An index of the words in each session, in small files. A search reads one or two of them."""

from collections.abc import Iterable, Iterator

N_SHARDS = 256


def shard_of(word: str) -> int:
    """Return the number of a word's file, from its first two letters. The page's script computes the same."""
    first, second = ord(word[0]), ord(word[1]) if len(word) > 1 else 0
    return (first * 31 + second) % N_SHARDS


class WordIndex:
    """Collects the words of sessions in order, and returns them by file."""

    def __init__(self) -> None:
        self._sessions: dict[str, list[int]] = {}

    def add(self, session: int, words: Iterable[str]) -> None:
        """Add the words of a session."""
        sessions = self._sessions
        for word in words:
            found = sessions.get(word)
            if found is None:
                sessions[word] = [session]
            else:
                found.append(session)

    def shards(self) -> Iterator[tuple[int, dict[str, list[int]]]]:
        """Yield each file with its words in order. Session numbers are stored as differences."""
        by_shard: dict[int, list[str]] = {}
        for word in self._sessions:
            by_shard.setdefault(shard_of(word), []).append(word)
        for shard, words in sorted(by_shard.items()):
            yield shard, {word: _steps(self._sessions[word]) for word in sorted(words)}


def _steps(numbers: list[int]) -> list[int]:
    return [after - before for before, after in zip([0, *numbers], numbers, strict=False)]
