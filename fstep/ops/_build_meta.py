"""`build_meta`: what attention needs to know of the batch, once for each KV group."""

from __future__ import annotations

import numpy as np

from fstep.state import I32, AttentionMeta, BatchState, Inputs, Log, Meta, Padding, Step, frozen_array


def build_meta(state: BatchState) -> BatchState:
    """The state with its `Meta`.

    A block table is as wide as its widest request, rounded up to a power of two, so that few widths occur. Raises
    `PhaseError` before `prepare` or `pad`.
    """
    step = state.need_step("build_meta")
    padding = step.need_padding("build_meta")
    groups = tuple(
        _group_meta(step.inputs, padding, index, blocks, group.block_size)
        for index, (blocks, group) in enumerate(zip(state.rows.blocks, state.plan.groups, strict=True))
    )
    return state.with_step(Step(step.schedule, step.inputs, padding, Meta(groups)))


def _group_meta(inputs: Inputs, padding: Padding, index: int, blocks: Log, block_size: int) -> AttentionMeta:
    some = padding.num_reqs > 0
    max_seq_len = int(inputs.seq_lens.max()) if some else 0
    return AttentionMeta(
        query_start_loc=padding.query_start_loc,
        seq_lens=padding.seq_lens,
        slot_mapping=padding.slot_mapping[index],
        block_table=_block_table(blocks, inputs, padding.descriptor.num_reqs, -(-max_seq_len // block_size)),
        num_reqs=padding.num_reqs,
        num_tokens=padding.num_tokens,
        max_query_len=int(inputs.num_scheduled_tokens.max()) if some else 0,
        max_seq_len=max_seq_len,
    )


def _block_table(blocks: Log, inputs: Inputs, num_reqs: int, widest: int) -> I32:
    table = blocks.table(inputs.rows, 1 << max(widest - 1, 0).bit_length())
    if num_reqs == len(inputs.rows):
        return table
    padded = np.zeros((num_reqs, table.shape[1]), np.int32)
    padded[: len(table)] = table
    return frozen_array(padded)
