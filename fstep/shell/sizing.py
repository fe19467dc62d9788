"""The plan that follows from a model and an engine's settings."""

from __future__ import annotations

import os

from fstep.state import BatchDescriptor, CacheConfig, ConfigError, KVGroup, Model, Plan, SchedLimits

KV_MEMORY_SHARE = 0.25  #: of the memory that is free, at most, unless `num_blocks` says otherwise
KV_MEMORY_MOST = 2 << 30  #: bytes, likewise


def plan_for(
    model: Model,
    cache: CacheConfig,
    limits: SchedLimits,
    eos_token_ids: tuple[int, ...] = (),
    capture: tuple[BatchDescriptor, ...] = (),
) -> Plan:
    """The plan of an engine: one KV group over all layers.

    Without `num_blocks` the cache holds what all requests at their longest could need, within the memory that is
    there. Raises `ConfigError` for a `max_model_len` past the model's.
    """
    longest = model.max_model_len if cache.max_model_len is None else cache.max_model_len
    if longest > model.max_model_len:
        raise ConfigError("max_model_len", longest, f"the model allows at most {model.max_model_len}")
    blocks = cache.num_blocks
    if blocks is None:
        most = limits.max_num_seqs * -(-longest // cache.block_size)
        blocks = max(min(most, _kv_memory() // bytes_per_block(model, cache.block_size)), 1)
    group = KVGroup(num_blocks=blocks + 1, block_size=cache.block_size, layers=tuple(range(len(model.kv_specs()))))
    return Plan(model.vocab_size, longest, (group,), eos_token_ids, capture, prefix_caching=cache.enable_prefix_caching)


def bytes_per_block(model: Model, block_size: int) -> int:
    """What one block takes over all layers, in bytes; at least 1, for a model that keeps nothing."""
    return max(block_size * sum(spec.bytes_per_token() for spec in model.kv_specs()), 1)


def _kv_memory() -> int:
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return min(int(KV_MEMORY_SHARE * free), KV_MEMORY_MOST)
