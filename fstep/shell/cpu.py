"""The CPU as a device, and its kernels."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import torch
from attrs import field, frozen
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as fn

from fstep.state import I32, AttentionSpec, DeviceMeta, LayerKV

_T = TypeVar("_T")

FEATURES_FIRST = range(5, 256)  #: rows for which `weight @ x.T` is faster than `linear` (benchmarks/generate.py)


@frozen(eq=False)
class Here(Generic[_T]):
    """A value that has arrived already."""

    value: _T

    def ready(self) -> bool:
        return True

    def wait(self) -> _T:
        return self.value


@frozen(eq=False)
class _Decodes:
    """The requests with one token each, `D` of them over `S` positions: one batched product over all."""

    tokens: Tensor  #: [D], index of each one's token in the batch
    pages: Tensor  #: [D * num_kv_heads * S / block_size], in the cache seen as pages of one head
    unseen: Tensor  #: [D, 1, 1, S] bool, positions past a request's length
    dead: Tensor  #: the same positions, in V seen as rows of head_dim


@frozen(eq=False)
class _Chunk:
    """One request with several tokens."""

    start: int
    stop: int
    seq_len: int
    pages: Tensor  #: [num_kv_heads * blocks], in the cache seen as pages of one head
    seen: Tensor | None  #: [tokens, seq_len] bool; None: plainly causal


@frozen(eq=False)
class _Plan:
    decodes: _Decodes | None
    chunks: tuple[_Chunk, ...]


@frozen
class CpuKernels:
    """Paged attention by gathering a request's pages, and products in the better of two layouts.

    A page is gathered by head, so what comes out is `[request, head, position, head_dim]` and goes into a batched
    product as it is. What lies past a request's length in its last page, or in the null block, is never multiplied,
    not even by zero.
    """

    def plan(self, meta: DeviceMeta, num_kv_heads: int, block_size: int) -> object:
        """Which pages to gather and what to mask, once for all layers of a group."""
        host = meta.host
        starts = host.query_start_loc[: host.num_reqs]
        lengths = host.query_start_loc[1 : host.num_reqs + 1] - starts
        lengths = np.minimum(lengths, host.seq_lens[: host.num_reqs])
        single, several = np.nonzero(lengths == 1)[0], np.nonzero(lengths > 1)[0]
        tables, seq_lens = host.block_table, host.seq_lens
        decodes = _plan_decodes(starts[single], tables[single], seq_lens[single], num_kv_heads, block_size)
        chunks = tuple(
            _plan_chunk(int(starts[b]), int(lengths[b]), int(seq_lens[b]), tables[b], num_kv_heads, block_size)
            for b in several.tolist()
        )
        return _Plan(decodes, chunks)

    def write_kv(self, layer: LayerKV, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Puts `k` and `v`, `[Tp, num_kv_heads, head_dim]`, at `slots [Tp]`; slot -1 is dropped."""
        block_size = layer.k.shape[2]
        if bool((slots < 0).any()):
            real = (slots >= 0).nonzero()[:, 0]
            slots, k, v = slots[real], k[real], v[real]
        block, offset = slots // block_size, slots % block_size
        layer.k[block, :, offset] = k
        layer.v[block, :, offset] = v

    def attention(self, q: Tensor, layer: LayerKV, meta: DeviceMeta, spec: AttentionSpec) -> Tensor:
        """Causal attention of `q [Tp, num_heads, head_dim]` over the cache: the same shape; 0 for padded tokens."""
        plan = meta.plan
        assert isinstance(plan, _Plan), "made by another backend"
        k, v = _by_head(layer.k), _by_head(layer.v)
        if plan.decodes is not None and len(plan.decodes.tokens) == len(q):
            return _decode(q, k, v, plan.decodes, spec)
        out = torch.zeros(q.shape, dtype=q.dtype)
        if plan.decodes is not None:
            out[plan.decodes.tokens] = _decode(q[plan.decodes.tokens], k, v, plan.decodes, spec)
        for chunk in plan.chunks:
            out[chunk.start : chunk.stop] = _prefill(q[chunk.start : chunk.stop], k, v, chunk, spec)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [Tp, in]` times `weight [out, in]`, transposed, plus `bias [out]`: `[Tp, out]`.

        For the sizes of a decode batch the result lies features first in memory.
        """
        if len(x) not in FEATURES_FIRST:
            return fn.linear(x, weight, bias)
        out = (weight @ x.t()).t()
        return out if bias is None else out.add_(bias)


@frozen
class CpuDevice:
    """The CPU: the verbs of a device, done at once."""

    name: str = "cpu"
    kernels: CpuKernels = field(factory=CpuKernels)

    def allocate(self, nbytes: int, align: int = 64) -> Tensor:
        """`[nbytes]` uint8, its address a multiple of `align`, not written to yet."""
        raw = torch.empty(nbytes + align, dtype=torch.uint8)
        skip = -raw.data_ptr() % align
        return raw[skip : skip + nbytes]

    def put(self, arrays: tuple[I32, ...]) -> tuple[Tensor, ...]:
        """Copies of int32 arrays as tensors, all in one buffer."""
        buffer = torch.as_tensor(np.concatenate([array.ravel() for array in arrays]))
        parts = torch.split(buffer, [array.size for array in arrays])
        return tuple(part.view(array.shape) for part, array in zip(parts, arrays, strict=True))

    def get(self, tensors: tuple[Tensor, ...]) -> Here[tuple[I32, ...]]:
        """Copies of int32 tensors as arrays."""
        return Here(tuple(tensor.numpy().copy() for tensor in tensors))


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(array, np.int64))


def _pages_of(table: I32, blocks: int, num_kv_heads: int) -> Tensor:
    """Where the pages of each head lie in a cache seen as pages of one head: `[..., num_kv_heads, blocks]`, flat."""
    heads = np.arange(num_kv_heads)[:, None]
    return _tensor(table[..., None, :blocks].astype(np.int64) * num_kv_heads + heads).flatten()


def _plan_decodes(starts: I32, table: I32, seq_lens: I32, num_kv_heads: int, block_size: int) -> _Decodes | None:
    if len(starts) == 0:
        return None
    blocks = -(-int(seq_lens.max()) // block_size)
    unseen = np.arange(blocks * block_size) >= seq_lens[:, None]
    by_head = np.broadcast_to(unseen[:, None], (len(starts), num_kv_heads, unseen.shape[1]))
    return _Decodes(
        tokens=_tensor(starts),
        pages=_pages_of(table, blocks, num_kv_heads),
        unseen=torch.as_tensor(unseen[:, None, None]),
        dead=_tensor(np.flatnonzero(by_head)),
    )


def _plan_chunk(start: int, length: int, seq_len: int, table: I32, num_kv_heads: int, block_size: int) -> _Chunk:
    seen = None
    if length < seq_len:
        seen = torch.as_tensor(np.arange(seq_len) <= np.arange(seq_len - length, seq_len)[:, None])
    pages = _pages_of(table, -(-seq_len // block_size), num_kv_heads)
    return _Chunk(start, start + length, seq_len, pages, seen)


def _by_head(pages: Tensor) -> Tensor:
    """A cache seen as pages of one head: `[num_blocks * num_kv_heads, block_size, head_dim]`."""
    return pages.view(-1, *pages.shape[2:])


def _decode(q: Tensor, k: Tensor, v: Tensor, plan: _Decodes, spec: AttentionSpec) -> Tensor:
    """`[D, num_heads, head_dim]`."""
    count, head_dim = len(q), spec.head_dim
    keys = k.index_select(0, plan.pages).view(count * spec.num_kv_heads, -1, head_dim)
    values = v.index_select(0, plan.pages).view(-1, head_dim).index_fill_(0, plan.dead, 0).view_as(keys)
    queries = (q * spec.scale).reshape(count * spec.num_kv_heads, -1, head_dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(count, spec.num_kv_heads, -1, keys.shape[1])
    weights = scores.masked_fill_(plan.unseen, -torch.inf).softmax(dim=-1)
    return torch.bmm(weights.view(queries.shape[0], -1, keys.shape[1]), values).view(count, spec.num_heads, head_dim)


def _prefill(q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, spec: AttentionSpec) -> Tensor:
    """`[tokens, num_heads, head_dim]`."""
    shape = (1, spec.num_kv_heads, -1, spec.head_dim)
    keys, values = (x.index_select(0, chunk.pages).view(shape)[:, :, : chunk.seq_len] for x in (k, v))
    out = fn.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=chunk.seen,
        is_causal=chunk.seen is None,
        scale=spec.scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
