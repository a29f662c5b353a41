"""Content hashes of full KV blocks: equal prefixes have equal hashes, in every process.

The hash of a block covers its own tokens and, through its parent's hash, all tokens before it, so one hash names a
whole prefix. What else decides the cache's content (a cache salt, later a LoRA) enters through the root of the chain;
what decides the content of some blocks only (an image inside the prompt) enters as `extra` of those blocks. SHA-256,
because a collision would hand one user the keys and values of another's prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

BlockHash = bytes  # 32 bytes


def root_hash(cache_salt: str | None = None, lora_id: str | None = None) -> BlockHash:
    """The parent of a request's first block."""
    digest = sha256(b"quire kv block v1")
    for key in (cache_salt, lora_id):
        data = b"" if key is None else b"\x01" + key.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int], extra: bytes = b"") -> BlockHash:
    """The hash of one full block. `token_ids` below 2**32."""
    return sha256(parent + array("I", token_ids).tobytes() + extra).digest()
