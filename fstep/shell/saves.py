"""One request as a value or a file, with its keys and values: it goes on in another engine, process or device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from fstep.ops._prepare import family_of, put, with_free_rows
from fstep.ops.requests import check_free_id, check_room, check_token_ids
from fstep.shell.kv import KVCache
from fstep.state import (
    I32,
    BatchState,
    CacheKey,
    CheckpointError,
    Item,
    LayerKV,
    Log,
    PhaseError,
    Plan,
    RequestError,
    RequestIds,
    RowPhase,
    Rows,
    SamplingRows,
    SchedState,
    StaleStateError,
    frozen_array,
    i32,
)

FORMAT = 1  #: of the file


@frozen(eq=False)
class SavedRequest:
    """A request between two steps: its row, and what the KV cache holds of it."""

    request_id: str
    token_ids: I32  #: prompt and output
    prompt_len: int
    prefill_len: int
    sampling: SamplingRows  #: of one row
    num_samples: int
    priority: int
    cache_key: CacheKey
    weights: I32  #: as in `Rows`
    weights_version: int  #: that of the scheduler when it was saved
    layers: tuple[LayerKV, ...]  #: K and V of each layer, [num_computed_tokens, num_kv_heads, head_dim] on the CPU

    @property
    def num_computed_tokens(self) -> int:
        return len(self.layers[0].k) if self.layers else 0

    def write(self, path: str | Path) -> None:
        """A NumPy archive: arrays, and a line of JSON that says what they are."""
        columns = {f"sampling.{name}": column for name, column in _columns(self.sampling).items()}
        pages = [pages for layer in self.layers for pages in (layer.k, layer.v)]
        about = {
            "fstep_request": FORMAT,
            **{name: getattr(self, name) for name in ("request_id", *_NUMBERS)},
            "cache_key": attrs.asdict(self.cache_key),
            "pages": [{"dtype": str(each.dtype).removeprefix("torch."), "shape": list(each.shape)} for each in pages],
        }
        raw = {f"pages.{n}": each.flatten().view(torch.uint8).numpy() for n, each in enumerate(pages)}
        arrays: dict[str, Any] = {"token_ids": self.token_ids, "weights": self.weights, **columns, **raw}
        with Path(path).open("wb") as file:
            np.savez(file, allow_pickle=False, about=np.array(json.dumps(about)), **arrays)

    @classmethod
    def read(cls, path: str | Path) -> SavedRequest:
        """What `write` wrote. Raises `CheckpointError` for any other file."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                return cls._from({name: archive[name] for name in archive.files})
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: is no request that fstep saved ({error})") from None

    @classmethod
    def _from(cls, arrays: dict[str, NDArray[Any]]) -> SavedRequest:
        about: dict[str, Any] = json.loads(str(arrays["about"]))
        if about["fstep_request"] != FORMAT:
            raise ValueError(f"format {about['fstep_request']}, and this fstep reads {FORMAT}")
        pages = [_tensor(arrays[f"pages.{n}"], each) for n, each in enumerate(about["pages"])]
        key: dict[str, Any] = {**about["cache_key"], "items": tuple(map(_item, about["cache_key"]["items"]))}
        columns = {each.name: arrays[f"sampling.{each.name}"] for each in attrs.fields(SamplingRows)}
        return cls(
            request_id=about["request_id"],
            token_ids=i32(arrays["token_ids"]),
            sampling=SamplingRows(**{name: frozen_array(column) for name, column in columns.items()}),
            cache_key=CacheKey(**key),
            weights=i32(arrays["weights"]),
            layers=tuple(LayerKV(k, v) for k, v in zip(pages[::2], pages[1::2], strict=True)),
            **{name: int(about[name]) for name in _NUMBERS},
        )


_NUMBERS = ("prompt_len", "prefill_len", "num_samples", "priority", "weights_version")


def save_request(
    state: BatchState, sched: SchedState, kv: KVCache, request_id: str, keys_and_values: bool = True
) -> SavedRequest:
    """A request that has a row, with what the cache holds of it unless that isn't wanted. It stays where it is.

    Raises `PhaseError` inside a step, `RequestError` for a request that has no row or has ended, and `StaleStateError`
    for a state that is not the newest of the cache's line.
    """
    _check_between_steps(state, kv, "save_request")
    rows = state.rows
    row = rows.request_ids.row_of.get(request_id)
    if row is None or rows.phase[row] not in (RowPhase.RUNNING, RowPhase.PREEMPTED):
        raise RequestError("request_id", request_id, "no request of this name has a row and is going on", request_id)
    computed = int(rows.num_computed_tokens[row]) if keys_and_values else 0
    blocks = tuple(
        i32(sched.filled_from(number, block) for block in log[row].tolist()) for number, log in enumerate(rows.blocks)
    )
    return SavedRequest(
        request_id=request_id,
        token_ids=i32(rows.tokens[row]),
        prompt_len=int(rows.prompt_len[row]),
        prefill_len=int(rows.prefill_len[row]),
        sampling=SamplingRows(**{name: i[row : row + 1] for name, i in _columns(rows.sampling).items()}),
        num_samples=int(rows.num_samples[row]),
        priority=int(rows.priority[row]),
        cache_key=rows.cache_keys[row],
        weights=i32(rows.weights[row]),
        weights_version=sched.weights_version,
        layers=kv.export(_slots(state.plan, blocks, computed)),
    )


def load_request(
    state: BatchState, sched: SchedState, kv: KVCache, saved: SavedRequest, request_id: str | None = None
) -> tuple[BatchState, SchedState, KVCache]:
    """A saved request in a row of its own, under its name or another; it goes on where it was.

    Where there are no blocks or no place among `max_num_seqs` for it, or the weights are of another version, it comes
    in preempted, and its tokens are computed again. The block size may be another than where it was saved. With keys
    and values the handle is used up, as by `forward`: go on with the one that comes back.

    Raises `PhaseError` inside a step, `StaleStateError` for an old state, `RequestError` for an id in use, or for a
    request that can't be served here: tokens out of the vocabulary, past `max_model_len`, or K and V of other shapes.
    """
    _check_between_steps(state, kv, "load_request")
    name = request_id or saved.request_id
    _check_servable(state, sched, kv, saved, name)
    computed, blocks, pools = _place(state, sched, saved)
    rows = _entered(with_free_rows(state.rows, 1), saved, name, computed, blocks)
    if computed:
        kv = kv.filled(_slots(state.plan, blocks, computed), saved.layers)
    running, preempted = ((name,), ()) if computed else ((), (name,))
    sched = evolve(
        sched,
        pools=pools,
        running=sched.running + running,
        preempted=sched.preempted + preempted,
        uncached=sched.uncached.union(running),
    )
    return BatchState(state.plan, rows, kv.line, kv.epoch), sched, kv


def _check_between_steps(state: BatchState, kv: KVCache, verb: str) -> None:
    if state.step is not None:
        raise PhaseError(verb, "commit")
    if (state.line, state.kv_epoch) != (kv.line, kv.epoch):
        raise StaleStateError(
            f"{verb}: the state is at epoch {state.kv_epoch} of line {state.line}, the KV cache at epoch {kv.epoch} of "
            f"line {kv.line}"
        )


def _check_servable(state: BatchState, sched: SchedState, kv: KVCache, saved: SavedRequest, name: str) -> None:
    plan, length = state.plan, len(saved.token_ids)
    check_free_id(sched, state, name)
    check_token_ids(plan, saved.token_ids, name)
    if length >= plan.max_model_len:
        limit = f"must leave room for one token within max_model_len={plan.max_model_len}"
        raise RequestError("length", length, limit, name)
    check_room(plan, min(plan.max_model_len, saved.prompt_len + int(saved.sampling.max_tokens[0])), name)
    ours = [(each.k.shape[1], each.k.shape[3], each.k.dtype) for each in kv.layers]
    theirs = [(*each.k.shape[1:], each.k.dtype) for each in saved.layers]
    if ours != theirs:
        what = "one (num_kv_heads, head_dim, dtype) a layer"
        raise RequestError("layers", theirs, f"must be as in this cache, {what}: {ours}", name)


def _place(state: BatchState, sched: SchedState, saved: SavedRequest) -> tuple[int, tuple[I32, ...], tuple[Any, ...]]:
    """How many computed tokens come in with the request, their blocks, and the pools without these."""
    computed, groups = saved.num_computed_tokens, state.plan.groups
    needed = [group.blocks_for(computed) for group in groups]
    room = all(need <= pool.num_free for need, pool in zip(needed, sched.pools, strict=True))
    place = len(sched.running) < sched.limits.max_num_seqs
    if not (computed and room and place and saved.weights_version == sched.weights_version):
        return 0, tuple(i32(()) for _ in groups), sched.pools
    blocks, pools = zip(*(pool.take(need) for need, pool in zip(needed, sched.pools, strict=True)), strict=True)
    return computed, blocks, pools


def _slots(plan: Plan, blocks: tuple[I32, ...], num_tokens: int) -> tuple[I32, ...]:
    """Where the first tokens of a request lie: one array a KV group, `[num_tokens]`."""
    positions = np.arange(num_tokens)
    return tuple(
        i32(held[positions // group.block_size] * group.block_size + positions % group.block_size)
        for held, group in zip(blocks, plan.groups, strict=True)
    )


def _entered(rows: Rows, saved: SavedRequest, name: str, computed: int, blocks: tuple[I32, ...]) -> Rows:
    """The rows with the request in the first free one."""
    row = int(np.nonzero(rows.phase == RowPhase.FREE)[0][0])
    at, length = np.array([row]), len(saved.token_ids)
    generation = rows.generation[at] + 1
    stop = _as_wide(rows.sampling.stop_token_ids, saved.sampling.stop_token_ids)
    ours = evolve(rows.sampling, stop_token_ids=stop[0])
    theirs = evolve(saved.sampling, stop_token_ids=stop[1])
    columns = {each: put(column, at, _columns(theirs)[each]) for each, column in _columns(ours).items()}
    return Rows(
        request_ids=RequestIds((*rows.request_ids[:row], name, *rows.request_ids[row + 1 :])),
        generation=put(rows.generation, at, generation),
        phase=put(rows.phase, at, RowPhase.RUNNING if computed else RowPhase.PREEMPTED),
        tokens=_with(rows.tokens, at, saved.token_ids),
        blocks=tuple(_with(log, at, held) for log, held in zip(rows.blocks, blocks, strict=True)),
        prompt_len=put(rows.prompt_len, at, saved.prompt_len),
        prefill_len=put(rows.prefill_len, at, saved.prefill_len if computed else length),
        num_tokens=put(rows.num_tokens, at, length),
        num_computed_tokens=put(rows.num_computed_tokens, at, computed),
        sampling=SamplingRows(**columns),
        cache_keys=(*rows.cache_keys[:row], saved.cache_key, *rows.cache_keys[row + 1 :]),
        family=put(rows.family, at, family_of(at, generation)),
        num_samples=put(rows.num_samples, at, saved.num_samples),
        priority=put(rows.priority, at, saved.priority),
        weights=_with(rows.weights, at, saved.weights),
    )


def _with(log: Log, at: NDArray[np.intp], items: I32) -> Log:
    return log.append(at, items, np.array([len(items)])) if len(items) else log


def _as_wide(ours: I32, theirs: I32) -> tuple[I32, I32]:
    """Two tables of stop ids with as many columns, -1 in those that are new."""
    width = max(ours.shape[1], theirs.shape[1])
    wide = (np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in (ours, theirs))
    first, second = map(frozen_array, wide)
    return first, second


def _item(fields: dict[str, Any]) -> Item:
    return Item(**fields)


def _columns(sampling: SamplingRows) -> dict[str, NDArray[Any]]:
    return {each.name: getattr(sampling, each.name) for each in attrs.fields(SamplingRows)}


def _tensor(raw: NDArray[Any], about: dict[str, Any]) -> Tensor:
    made = torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]))
    made.flatten().view(torch.uint8).copy_(torch.from_numpy(raw))  # pyright: ignore[reportUnknownMemberType]
    return made
