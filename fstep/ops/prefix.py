"""What full KV blocks hold, as hashes: the keys of the prefix cache.

A block's hash is that of its parent's hash, its token ids, and what else decides its keys and values, each part tagged
with its kind. So equal hashes mean equal prefixes, back to the first token. The layout is vLLM's `sha256_cbor`:
SHA-256 over the canonical CBOR (RFC 8949) of `[parent, token ids, extra keys or null]`, which external indexers
compute too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from fstep.state import I32, BlockPool, CacheKey, KVGroup, NewRequest, Plan

ROOT: Final = hashlib.sha256(b"fstep").digest()  #: the parent of every first block

ExtraKey: TypeAlias = tuple[str | int, ...]


def block_hash(parent: bytes, token_ids: Sequence[int], extra: Sequence[object] = ()) -> bytes:
    """SHA-256 of the canonical CBOR of a block: 32 bytes."""
    ids = b"".join(map(_unsigned, token_ids))
    return hashlib.sha256(b"\x83" + _cbor(parent) + _head(4, len(token_ids)) + ids + _cbor(extra or None)).digest()


def extra_keys(start: int, stop: int, key: CacheKey, weights_version: int = 0) -> tuple[ExtraKey, ...]:
    """What beside token ids decides the block of tokens `start` to `stop` of a request.

    In this order: the adapter, each item that lies in the block, with its offset from the block's start (negative if it
    began before), the salt (in the first block), the weights version. What is not set is not there.
    """
    keys: list[ExtraKey] = []
    if key.lora_name is not None:
        keys.append(("lora", key.lora_name, key.lora_generation)[: 3 if key.lora_generation else 2])
    for item in key.items:
        if item.offset < stop and item.offset + item.length > start:
            keys.append(("image", item.content_hash, item.offset - start))
    if key.salt is not None and start == 0:
        keys.append(("salt", key.salt))
    if weights_version:
        keys.append(("weights", weights_version))
    return tuple(keys)


def hashes_of(
    token_ids: I32, block_size: int, key: CacheKey, weights_version: int = 0, first: int = 0, parent: bytes = ROOT
) -> Iterator[bytes]:
    """The hashes of the whole blocks of a request from block `first` on, whose parent has the hash `parent`."""
    bare = key == _BARE and not weights_version
    ids: list[int] = token_ids[first * block_size :].tolist()
    for at in range(0, len(ids) - block_size + 1, block_size):
        start = first * block_size + at
        extra = () if bare else extra_keys(start, start + block_size, key, weights_version)
        parent = block_hash(parent, ids[at : at + block_size], extra)
        yield parent


def all_hashes(plan: Plan, token_ids: I32, key: CacheKey, weights_version: int = 0) -> tuple[tuple[bytes, ...], ...]:
    """The hashes of a request's whole blocks, one tuple a KV group; empty where nothing is cached."""
    if not plan.prefix_caching:
        return ((),) * len(plan.groups)
    return tuple(tuple(hashes_of(token_ids, group.block_size, key, weights_version)) for group in plan.groups)


def hashed(request: NewRequest, plan: Plan, weights_version: int) -> tuple[tuple[bytes, ...], ...]:
    """The hashes of a request that waits: those that it carries, or made now."""
    if request.block_hashes is not None:
        return request.block_hashes
    return all_hashes(plan, request.prompt_token_ids, request.cache_key, weights_version)


def hit_length(
    pools: Sequence[BlockPool], groups: Sequence[KVGroup], hashes: Sequence[Sequence[bytes]], num_tokens: int
) -> int:
    """How many leading tokens of a request every KV group has in cached blocks: whole blocks of each.

    The last of its `num_tokens` tokens is never among them, since its logits are wanted.
    """
    hit = num_tokens - 1
    while True:
        before = hit
        for pool, group, each in zip(pools, groups, hashes, strict=True):
            hit = min(hit // group.block_size, _leading(pool, each)) * group.block_size
        if hit == before:
            return hit


def _leading(pool: BlockPool, hashes: Sequence[bytes]) -> int:
    """How many leading hashes are cached."""
    return next((n for n, each in enumerate(hashes) if pool.find(each) is None), len(hashes))


_BARE: Final = CacheKey()


def _cbor(value: Any) -> bytes:
    """Canonical CBOR of integers, strings, bytes, None, and sequences of them."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _unsigned(value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    return _head(4, len(value)) + b"".join(map(_cbor, value))


def _unsigned(number: int) -> bytes:
    """CBOR of an integer under 2**32; spelled out, since a block has many."""
    if number < 24:
        return number.to_bytes(1, "big")
    if number < 1 << 8:
        return (0x18 << 8 | number).to_bytes(2, "big")
    if number < 1 << 16:
        return (0x19 << 16 | number).to_bytes(3, "big")
    return (0x1A << 32 | number).to_bytes(5, "big") if number < 1 << 32 else _head(0, number)


def _head(major: int, number: int) -> bytes:
    """A CBOR head: the kind in three bits, the number in as few bytes as it needs."""
    kind = major << 5
    if number < 24:
        return (kind | number).to_bytes(1, "big")
    size = next(size for size in (1, 2, 4, 8) if number < 1 << (8 * size))
    return (kind | 23 + size.bit_length()).to_bytes(1, "big") + number.to_bytes(size, "big")
