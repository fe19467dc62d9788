"""`build_meta`: what attention needs to know of the batch, once for each KV group and each of its attention groups."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from fstep.ops._pad import tail_of
from fstep.ops.groups import kernel_blocks, shared_columns
from fstep.state import (
    I32,
    AttentionGroup,
    AttentionMeta,
    BatchState,
    FullAttention,
    Inputs,
    KVGroup,
    Log,
    Meta,
    Padding,
    Step,
    frozen_array,
)


def build_meta(state: BatchState, capture: bool = False) -> BatchState:
    """The state with its `Meta`.

    A block table is as wide as its widest request, rounded up to a power of two, so that few widths occur. With
    `capture` it is the worst batch of the padded shape instead: every request as long as can be, all on the null block,
    and nothing is written, so that a graph captured with it holds for every step of the shape. Raises `PhaseError`
    before `prepare` or `pad`.
    """
    step = state.need_step("build_meta")
    padding = step.need_padding("build_meta")
    plan = state.plan
    if capture:
        groups = tuple(_worst_meta(padding, group, plan.max_model_len) for group in plan.groups)
    else:
        groups = tuple(
            _group_meta(step.inputs, padding, index, blocks, group)
            for index, (blocks, group) in enumerate(zip(state.rows.blocks, plan.groups, strict=True))
        )
    attention = tuple(
        tuple(_attention_meta(meta, step.inputs, group, each) for each in group.attention) or (meta,)
        for meta, group in zip(groups, plan.groups, strict=True)
    )
    return state.with_step(Step(step.schedule, step.inputs, padding, Meta(groups, attention)))


def _group_meta(inputs: Inputs, padding: Padding, index: int, blocks: Log, group: KVGroup) -> AttentionMeta:
    some = padding.num_reqs > 0
    max_seq_len = int(inputs.seq_lens.max()) if some else 0
    table = blocks.table(inputs.rows, _width(max_seq_len, group.block_size))
    return AttentionMeta(
        query_start_loc=padding.query_start_loc,
        seq_lens=padding.seq_lens,
        slot_mapping=padding.slot_mapping[index],
        block_table=_with_tail(table, padding.descriptor.num_reqs),
        num_reqs=padding.num_reqs,
        num_tokens=padding.num_tokens,
        max_query_len=int(inputs.num_scheduled_tokens.max()) if some else 0,
        max_seq_len=max_seq_len,
        common_prefix_len=_common_prefix_len(table, inputs, group) if some else 0,
    )


def _worst_meta(padding: Padding, group: KVGroup, max_model_len: int) -> AttentionMeta:
    """What attention may at most have to do in the padded shape."""
    num_tokens, num_reqs = padding.descriptor.num_tokens, padding.descriptor.num_reqs
    return AttentionMeta(
        query_start_loc=padding.query_start_loc,
        seq_lens=frozen_array(np.full(num_reqs, max_model_len, np.int32)),
        slot_mapping=frozen_array(np.full(num_tokens, -1, np.int32)),
        block_table=frozen_array(np.zeros((num_reqs, _width(max_model_len, group.block_size)), np.int32)),
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=int(np.diff(padding.query_start_loc).max(initial=0)),
        max_seq_len=max_model_len,
    )


def _attention_meta(meta: AttentionMeta, inputs: Inputs, group: KVGroup, each: AttentionGroup) -> AttentionMeta:
    """The metadata of one attention group, where it wants another table or tail than its KV group has."""
    if each.kernel_block_size not in (None, group.block_size):
        meta = evolve(meta, block_table=kernel_blocks(meta.block_table, group.block_size, each.kernel_block_size))
    if each.tail is not None:
        more = len(meta.seq_lens) - len(inputs.rows)
        tail = tail_of(inputs.query_start_loc, more, len(meta.slot_mapping), each.tail)
        meta = evolve(meta, query_start_loc=tail)
    return meta


def unpadded(meta: AttentionMeta) -> AttentionMeta:
    """The same for the real requests and tokens alone, for a drafter that runs without the padding."""
    return evolve(
        meta,
        query_start_loc=meta.query_start_loc[: meta.num_reqs + 1],
        seq_lens=meta.seq_lens[: meta.num_reqs],
        slot_mapping=meta.slot_mapping[: meta.num_tokens],
        block_table=meta.block_table[: meta.num_reqs],
    )


def _common_prefix_len(block_table: I32, inputs: Inputs, group: KVGroup) -> int:
    """A window moves away from the prefix, so only full attention has a common one."""
    if not isinstance(group.kind, FullAttention) or (block_table[:, 0] != block_table[0, 0]).any():
        return 0
    whole = int((inputs.seq_lens - inputs.num_scheduled_tokens).min()) // group.block_size
    return shared_columns(block_table[:, :whole]) * group.block_size


def _width(num_tokens: int, block_size: int) -> int:
    """Blocks of `num_tokens` tokens, rounded up to a power of two."""
    return 1 << max(-(-num_tokens // block_size) - 1, 0).bit_length()


def _with_tail(table: I32, num_reqs: int) -> I32:
    if num_reqs == len(table):
        return table
    padded = np.zeros((num_reqs, table.shape[1]), np.int32)
    padded[: len(table)] = table
    return frozen_array(padded)
