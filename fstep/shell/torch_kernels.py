"""Kernels in torch alone: the tested reference of those in C, and what runs where there is no C compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fstep.state import AttentionSpec, DeviceMeta, LayerKV, ragged_arange

BLOCKED_ROWS = range(2, 257)  #: tokens for which a product is fastest in blocks of the weight
BLOCK_SIZES = (48, 64, 32, 96, 80, 56, 40)  #: rows of such a block, best first
FEW = 4  #: a request with so many query tokens joins the batched call, one query a token
NEAR = 128  #: tokens; lengths up to here share a batched call, and then those within a factor of two


@frozen(eq=False)
class _Batched:
    """`n` query tokens over at most `S` positions each, attended in one call."""

    tokens: Tensor | None  #: [n] int64, which of the batch's tokens; None if they are all of them, in order
    cells: Tensor  #: [n * num_kv_heads, S], where K and V lie; past the query's own position that cell again
    mask: Tensor  #: [n * num_kv_heads, 1, S] float32, 0 for what the query sees and -inf past it


@frozen(eq=False)
class _Chunk:
    """A request with many query tokens, over `S` positions."""

    start: int
    stop: int
    cells: Tensor  #: [num_kv_heads * S], where K and V lie
    seen: Tensor | None  #: [stop - start, S] bool; None: the queries are all of its tokens


@frozen(eq=False)
class _Plan:
    batches: tuple[_Batched, ...]
    chunks: tuple[_Chunk, ...]


@frozen
class TorchKernels:
    """Paged attention, products and what lies between them, for tensors on the CPU.

    A cache is read as `cells [num_blocks * num_kv_heads * block_size, head_dim]`: with the index of a cell for each
    position, head by head, the pages of a request come out as `[num_kv_heads, S, head_dim]` in one gather. Only
    positions that the request has written are ever read, so what lies in other cells, NaN too, can't matter.
    """

    @property
    def name(self) -> str:
        return "torch"

    def plan(self, meta: DeviceMeta, num_kv_heads: int, block_size: int) -> object:
        """Which cells each query reads and what it sees of them."""
        return _plan(meta, num_kv_heads, block_size)

    def write_kv(self, layer: LayerKV, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Puts `k` and `v`, `[Tp, num_kv_heads, head_dim]`, at `slots [Tp]`; slot -1 is dropped."""
        _, num_kv_heads, block_size, head_dim = layer.k.shape
        at: NDArray[Any] = slots.numpy().astype(np.int64)
        if at.size and at.min() < 0:
            kept = np.flatnonzero(at >= 0)
            at, k, v = at[kept], k[_tensor(kept)], v[_tensor(kept)]
        first = at + at // block_size * (block_size * (num_kv_heads - 1))
        cells = _tensor((first[:, None] + np.arange(num_kv_heads) * block_size).ravel())
        for pages, new in ((layer.k, k), (layer.v, v)):
            pages.view(-1, head_dim).index_copy_(0, cells, new.to(pages.dtype).reshape(-1, head_dim))

    def attention(self, q: Tensor, layer: LayerKV, meta: DeviceMeta, spec: AttentionSpec) -> Tensor:
        """Causal attention of `q [Tp, num_heads, head_dim]` over the cache: the same shape, 0 for padded tokens."""
        plan = meta.plan
        if not isinstance(plan, _Plan):
            plan = _plan(meta, spec.num_kv_heads, layer.k.shape[2])
        q = q.contiguous()
        if len(plan.batches) == 1 and plan.batches[0].tokens is None:
            return _attend_batched(q, layer, plan.batches[0], spec)
        out = torch.zeros_like(q)
        for batch in plan.batches:
            out[batch.tokens] = _attend_batched(q[batch.tokens], layer, batch, spec)
        for chunk in plan.chunks:
            out[chunk.start : chunk.stop] = _attend_chunk(q[chunk.start : chunk.stop], layer, chunk, spec)
        return out

    def weight(self, matrix: Tensor) -> Any:
        """The matrix as it is."""
        return matrix

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (Zhang & Sennrich 2019), worked out in float32: as `x`.

        Spelled out, and with a sum for the mean, because on a CPU that is the fastest for either order of strides.
        """
        wide = x.float()
        scale = (wide * wide).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
        return (wide * scale).type_as(x).mul_(weight)

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`more + x`, and its norm."""
        total = more + x  # in this order the sum has the strides of the product, which `linear` chose
        return total, self.rms_norm(total, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`heads [Tp, n, head_dim]` turned by `cos [Tp, 1, head_dim]` and `sin [Tp, 1, head_dim / 2]`."""
        first, second = heads.chunk(2, dim=-1)
        turned = heads * cos
        turned_first, turned_second = turned.chunk(2, dim=-1)
        turned_first.addcmul_(second, sin, value=-1)
        turned_second.addcmul_(first, sin)
        return turned

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu of the first half of `x [Tp, 2 n]` times the second half: `[Tp, n]`."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [Tp, in]` times `weight [out, in]`, transposed, plus `bias [out]`: `[Tp, out]`.

        At the sizes of a decode batch a product is fastest as many small ones, of some rows of the weight with all of
        the transposed `x`, and for a prompt as one such product: so the result lies features-first in memory, and it is
        best if `x` does.
        """
        if len(x) < BLOCKED_ROWS.start or weight.dtype != torch.float32:
            return F.linear(x, weight, bias)
        size = _block_rows(len(weight)) if len(x) in BLOCKED_ROWS else None
        if size is None:
            out = (weight @ x.t()).t()
            return out if bias is None else out.add_(bias)
        blocks = weight.view(-1, size, weight.shape[1])
        columns = x.t().contiguous().expand(len(blocks), -1, -1)
        if bias is None:
            return torch.bmm(blocks, columns).flatten(0, 1).t()
        return torch.baddbmm(bias.view(-1, size, 1), blocks, columns).flatten(0, 1).t()


def _block_rows(rows: int) -> int | None:
    return next((size for size in BLOCK_SIZES if rows % size == 0), None)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


@frozen(eq=False)
class _PageTable:
    """Where a group's requests keep their K and V."""

    blocks: NDArray[np.int64]  #: [Bp, W]
    num_kv_heads: int
    block_size: int

    def cells(self, rows: NDArray[Any], positions: NDArray[Any]) -> Tensor:
        """The cells of `positions [n, S]` of the requests `rows [n]`, by head: `[n * num_kv_heads, S]`."""
        blocks = self.blocks[rows[:, None], positions // self.block_size]
        first = blocks * (self.num_kv_heads * self.block_size) + positions % self.block_size
        cells = first[:, None] + np.arange(self.num_kv_heads)[:, None] * self.block_size
        small = cells.size == 0 or cells.max() <= np.iinfo(np.int32).max  # half the bytes to read: it shows
        return _tensor(cells.astype(np.int32 if small else np.int64).reshape(-1, positions.shape[1]))


def _plan(meta: DeviceMeta, num_kv_heads: int, block_size: int) -> _Plan:
    host = meta.host
    first, end = host.query_start_loc[: host.num_reqs], host.query_start_loc[1 : host.num_reqs + 1]
    seq_lens, counts = host.seq_lens[: host.num_reqs], end - first
    pages = _PageTable(host.block_table.astype(np.int64), num_kv_heads, block_size)
    short, long = np.flatnonzero(counts <= FEW), np.flatnonzero(counts > FEW)
    tokens, rows = ragged_arange(first[short], counts[short]), np.repeat(short, counts[short])
    batches = _batches(pages, tokens, rows, seq_lens[rows] - end[rows] + tokens + 1, len(host.slot_mapping))
    chunks = tuple(_chunk(pages, row, int(first[row]), int(end[row]), int(seq_lens[row])) for row in long.tolist())
    return _Plan(batches, chunks)


def _batches(
    pages: _PageTable, tokens: NDArray[Any], rows: NDArray[Any], lengths: NDArray[Any], num_tokens: int
) -> tuple[_Batched, ...]:
    """Query tokens that see `lengths` positions of their requests, batched with others of like lengths."""
    octaves = np.ceil(np.log2(np.maximum(lengths, NEAR)))
    made: list[_Batched] = []
    for octave in np.unique(octaves):
        mine = np.flatnonzero(octaves == octave)
        seen = lengths[mine][:, None]
        positions = np.arange(int(seen.max()))
        cells = pages.cells(rows[mine], np.minimum(positions, seen - 1))
        mask = np.where(positions < seen, np.float32(0), np.float32(-np.inf)).repeat(pages.num_kv_heads, axis=0)
        everybody = len(mine) == num_tokens
        made.append(_Batched(None if everybody else _tensor(tokens[mine]), cells, _tensor(mask[:, None])))
    return tuple(made)


def _chunk(pages: _PageTable, row: int, start: int, stop: int, seq_len: int) -> _Chunk:
    positions = np.arange(seq_len)
    cells = pages.cells(np.array([row]), positions[None]).flatten()
    whole = stop - start == seq_len
    seen = None if whole else _tensor(positions <= np.arange(seq_len - stop + start, seq_len)[:, None])
    return _Chunk(start, stop, cells, seen)


def _attend_batched(q: Tensor, layer: LayerKV, batch: _Batched, spec: AttentionSpec) -> Tensor:
    """`[n, num_heads, head_dim]`.

    V isn't gathered: a weighted sum of some rows of a table is what `embedding_bag` does, straight from the cache.
    """
    group, head_dim = spec.num_heads // spec.num_kv_heads, spec.head_dim
    k, v = layer.k.view(-1, head_dim), layer.v.view(-1, head_dim)
    keys = k.index_select(0, batch.cells.flatten()).view(*batch.cells.shape, head_dim)
    queries = q.view(-1, group, head_dim).float()
    scores = torch.bmm(queries, keys.transpose(1, 2).float()).mul_(spec.scale).add_(batch.mask)
    weights = scores.softmax(dim=-1).flatten(0, 1).to(v.dtype)
    cells = batch.cells.repeat_interleave(group, dim=0)
    return F.embedding_bag(cells, v, mode="sum", per_sample_weights=weights).view(q.shape)


def _attend_chunk(q: Tensor, layer: LayerKV, chunk: _Chunk, spec: AttentionSpec) -> Tensor:
    """`[stop - start, num_heads, head_dim]`; the query heads that share a KV head read the same copy of it."""
    head_dim, shape = spec.head_dim, (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
    k, v = (
        pages.view(-1, head_dim)
        .index_select(0, chunk.cells)
        .view(shape[0], 1, -1, head_dim)
        .expand(-1, shape[1], -1, -1)
        for pages in (layer.k, layer.v)
    )
    queries = q.view(len(q), *shape, head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=chunk.seen, is_causal=chunk.seen is None, scale=spec.scale
    )
    return out.permute(2, 0, 1, 3).reshape(q.shape)
