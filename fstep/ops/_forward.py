"""`forward`: the model on the batch. Pure but for the KV cache, whose handle it takes and whose next one it returns."""

from __future__ import annotations

import torch
from attrs import evolve

from fstep.ops.lines import next_epoch
from fstep.state import KV, BatchState, DeviceInputs, DeviceMeta, Env, Meta, Output, Step


def forward(state: BatchState, env: Env, kv: KV, taps: tuple[str, ...] = ()) -> tuple[BatchState, KV]:
    """The state with the step's `Output`: float32 logits `[L, V]` of the rows that draw, and the next KV handle.

    `taps` names intermediates of the model that are wanted too, `[Tp, …]` each, for the padded batch (copy one before
    you change it in place: they are inference tensors). `kv` is dead afterwards, unless something raised.

    Raises `PhaseError` before `build_meta`, `DonatedError` for a handle that was used, `StaleStateError` for a state
    that is not the newest of the cache's line, `ValueError` for an unknown tap.
    """
    step = state.need_step("forward")
    meta = step.need_meta("forward")
    epoch = next_epoch(state, kv)
    if step.schedule.copies:
        kv.copy_blocks(step.schedule.copies)
    if len(step.inputs.token_ids):
        x = _device_inputs(step, meta, env, tuple(group.block_size for group in state.plan.groups))
        with torch.inference_mode():  # a tenth of a decode step on a CPU is autograd's bookkeeping otherwise
            hidden = env.model.hidden(env.params, x, kv, env.device.kernels, taps)
        drawn = hidden.states.index_select(0, x.logits_indices)
        logits = env.model.logits(env.params, drawn, env.device.kernels)
        output = Output(logits, hidden.taps, env.weights_version)
    else:
        output = Output(torch.empty((0, env.model.vocab_size)), weights_version=env.weights_version)
    after = evolve(step, output=output, sampled=None)
    return BatchState(state.plan, state.rows, state.line, epoch, after), kv.advance(epoch, step.inputs)


def _device_inputs(step: Step, meta: Meta, env: Env, block_sizes: tuple[int, ...]) -> DeviceInputs:
    """The arrays of the step on the device, in one transfer."""
    padding = step.need_padding("forward")
    shared = (padding.token_ids, padding.positions, step.inputs.logits_indices)
    lengths = (padding.query_start_loc, padding.seq_lens)
    pages = tuple(array for group in meta.groups for array in (group.slot_mapping, group.block_table))
    token_ids, positions, logits_indices, query_start_loc, seq_lens, *paged = env.device.put(shared + lengths + pages)
    specs = {spec.group: spec for spec in env.model.kv_specs()}
    groups: list[DeviceMeta] = []
    for index, host in enumerate(meta.groups):
        bare = DeviceMeta(host, query_start_loc, seq_lens, paged[2 * index], paged[2 * index + 1])
        plan = env.device.kernels.plan(bare, specs[index].num_kv_heads, block_sizes[index])
        groups.append(evolve(bare, plan=plan))
    return DeviceInputs(token_ids, positions, logits_indices, tuple(groups))
