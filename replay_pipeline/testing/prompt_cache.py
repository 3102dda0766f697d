"""A simulation of a provider's prompt cache, which matches prefixes block by block."""

import hashlib
from collections import OrderedDict

BLOCK_BYTES = 512
MIN_CACHED_TOKENS = 1024
BYTES_PER_TOKEN = 4


class PromptCache:
    """The cache of prompts, by cumulative block hashes per model and session, with an expiry time.

    As with a real provider, a prompt can be read only after a call with it has completed. Calls
    without a session go to any machine and find nothing, and short prompts aren't cached.
    """

    def __init__(self, *, ttl_s: float = 300.0, max_blocks: int = 2_000_000) -> None:
        self.ttl_s = ttl_s
        self.max_blocks = max_blocks
        self._seen: OrderedDict[bytes, float] = OrderedDict()

    def blocks(self, model: str, session: str, prompt: bytes) -> list[bytes]:
        """Return hashes of the complete blocks of `prompt`. Each covers everything up to its end."""
        digest = hashlib.blake2b(f"{model}\0{session}\0".encode(), digest_size=16)
        names = []
        for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            digest.update(prompt[start : start + BLOCK_BYTES])
            names.append(digest.digest())
        return names

    def n_cached_tokens(self, blocks: list[bytes], now: float) -> int:
        """Return the number of tokens of the longest prefix that is still cached."""
        n = 0
        for name in blocks:
            if self._seen.get(name, float("-inf")) < now - self.ttl_s:
                break
            n += 1
        tokens = n * BLOCK_BYTES // BYTES_PER_TOKEN
        return tokens if tokens >= MIN_CACHED_TOKENS else 0

    def store(self, blocks: list[bytes], now: float) -> None:
        """Store a prompt that was just read."""
        for name in blocks:
            self._seen[name] = now
            self._seen.move_to_end(name)
        while len(self._seen) > self.max_blocks:
            self._seen.popitem(last=False)
