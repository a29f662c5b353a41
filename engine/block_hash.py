"""Content hashes of full KV blocks: equal prefixes have equal hashes, in every process.

The hash of a block covers its own tokens and, through its parent's hash, all tokens before it, so one hash names a
whole prefix. A key, under which a block is cached, is that hash and a *scope*: what else decides the content of all
blocks of a request (its cache salt, its LoRA) and the KV cache group. What decides the content of some blocks only
(an image inside the prompt) enters the hash as `extra` of those blocks. SHA-256, because a collision would hand one
user the keys and values of another's prompt.

    key = SHA-256(parent hash, token ids, extra)  |  first 16 bytes of SHA-256(salt, LoRA)  |  group
          32 bytes: the content                      17 bytes: the scope
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .outputs import MediaSpan

BlockHash = bytes  # 32 bytes
ROOT: BlockHash = sha256(b"quire kv block v1").digest()  # the parent of every request's first block
SCOPE_BYTES = 17


def hash_block(parent: BlockHash, token_ids: Sequence[int], extra: bytes = b"") -> BlockHash:
    """The hash of one full block. Token ids are below 2**32."""
    return sha256(parent + array("I", token_ids).tobytes() + extra).digest()


def hash_prompt(
    token_ids: Sequence[int], num_blocks: int, block_size: int, media: Sequence[MediaSpan] = ()
) -> list[BlockHash]:
    """The hashes of the first `num_blocks` blocks, which must be full, all at once: the same as one by one."""
    data = array("I", token_ids[: num_blocks * block_size]).tobytes()
    num_bytes = block_size * array("I").itemsize
    hashes, parent = [], ROOT
    for index in range(num_blocks):
        extra = media_key(media, index * block_size, (index + 1) * block_size) if media else b""
        parent = sha256(parent + data[index * num_bytes : (index + 1) * num_bytes] + extra).digest()
        hashes.append(parent)
    return hashes


def media_key(media: Sequence[MediaSpan], start: int, stop: int) -> bytes:
    """What the media say of the block of these positions: which of them begins where, seen from its start."""
    spans = [each for each in media if each.offset < stop and each.offset + each.length > start]
    return b"".join((each.offset - start).to_bytes(8, "little", signed=True) + each.content_hash for each in spans)


def hash_scope(cache_salt: str | None = None, lora_id: str | None = None) -> bytes:
    """The part of a request's scope that is the same for all groups, 16 bytes."""
    digest = sha256()
    for key in (cache_salt, lora_id):
        data = b"" if key is None else b"\x01" + key.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()[: SCOPE_BYTES - 1]


def group_scope(scope: bytes, group: int) -> bytes:
    """What is appended to a block's hash to give its key in a KV cache group (below 256)."""
    return scope + bytes([group])
