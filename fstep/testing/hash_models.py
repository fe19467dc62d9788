"""Models whose logits are a hash of what the paged cache holds: any schedule must give exactly the same tokens.

They keep their data in the cache alone: they write it at `slot_mapping` through `Kernels.write_kv` and read it back
through the block table, so a wrong slot, block, position or length changes a token at once, and a cell that belongs
to nobody, if it holds NaN, makes the logits NaN. They are also the shortest worked examples of `Model`:

- name what a layer keeps for a token (`kv_specs`): here two numbers, so one head of size one;
- in `hidden`, for each layer: make K and V of the batch's tokens, write them at `meta.slot_mapping`, then look at the
  other tokens of each request through `meta.block_table` and `meta.seq_lens` and nowhere else;
- give one vector a token back, of which `logits` gets those that something is drawn from.

All arithmetic is on integers that float32 or float64 hold exactly, so the same bits come out on every device. torch
is imported when a model runs; `reference_logits` does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from fstep.state import F32, KV, DeviceInputs, DeviceMeta, Hidden, Kernels, LayerKV, LayerSpec, Tree

if TYPE_CHECKING:
    from torch import Tensor

_MASK = 2**31 - 1  # hashes have 31 bits: a product of two of them fits int64
_CELL = 2**24  # what a cell of the cache holds lies below: float32 is exact there
_TOKEN, _PLACE, _INDEX, _START = 0x1B873593, 0x5F3759DF, 0x27D4EB2F, 0x165667B1
_TOP = 8.0  # logits lie in [0, 8): a few candidates at temperature 1, one at 0.1, all at 10


@frozen
class HashModel:
    """Logits are a hash of all tokens up to a position, which stands for attention.

    Cell `p` of the first layer holds (token id, position); cell `p` of a later one the hash of the cells up to `p` of
    the layer before. Taps: `layers.0`, `layers.1`, …: the hashes of a layer, `[Tp]`.
    """

    vocab_size: int
    max_model_len: int
    layer_groups: tuple[int, ...] = (0,)  #: the KV group of each layer

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(LayerSpec(num_kv_heads=1, head_dim=1, group=group) for group in self.layer_groups)

    def hidden(self, params: Tree, x: DeviceInputs, kv: KV, kernels: Kernels, taps: tuple[str, ...] = ()) -> Hidden:  # noqa: ARG002
        """Hashes `[Tp, 1]` float64, NaN for padded tokens."""
        made: dict[str, Tensor] = {}
        hashes = x.token_ids
        for number, (layer, group) in enumerate(zip(kv.layers, self.layer_groups, strict=True)):
            _write(kernels, layer, x.groups[group], hashes % _CELL, x.positions)
            hashes = _prefix_hashes(layer, x.groups[group], x.positions)
            made[f"layers.{number}"] = hashes
        return Hidden(hashes[:, None], _asked(made, taps))

    def logits(self, params: Tree, hidden: Tensor, kernels: Kernels) -> Tensor:  # noqa: ARG002
        return _logits(hidden, self.vocab_size)

    def reference_logits(self, token_ids: Sequence[int]) -> F32:
        """The logits after `token_ids`, without a cache: `[V]` float32."""
        cells: Sequence[int] = token_ids
        hashes: list[int] = []
        for _ in self.layer_groups:
            hashes = []
            for position, cell in enumerate(cells):
                mixed = _mix(_place(cell % _CELL, position, position))
                hashes.append(mixed + (hashes[-1] if hashes else 0))
            cells = hashes
        return logits_of(hashes[-1], self.vocab_size)


@frozen
class RollingModel:
    """Logits are a hash that goes from token to token, which stands for recurrent layers.

    Cell `p` is made from cell `p - 1`, read back from the cache at the start of a chunk, and token `p`. Tap:
    `layers.0`, the cells, `[Tp]`.
    """

    vocab_size: int
    max_model_len: int

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(num_kv_heads=1, head_dim=1),)

    def hidden(self, params: Tree, x: DeviceInputs, kv: KV, kernels: Kernels, taps: tuple[str, ...] = ()) -> Hidden:  # noqa: ARG002
        """Cells `[Tp, 1]` float64, NaN for padded tokens."""
        layer, meta = kv.layers[0], x.groups[0]
        _write(kernels, layer, meta, _rolled(layer, meta, x), x.positions)
        requests = _request_of_token(meta, len(x.positions))
        cells = _if_real(meta, _read(layer.k, meta, requests, x.positions.long()))
        return Hidden(cells[:, None], _asked({"layers.0": cells}, taps))

    def logits(self, params: Tree, hidden: Tensor, kernels: Kernels) -> Tensor:  # noqa: ARG002
        return _logits(hidden, self.vocab_size)

    def reference_logits(self, token_ids: Sequence[int]) -> F32:
        """The logits after `token_ids`, without a cache: `[V]` float32."""
        cell = 0
        for token_id in token_ids:
            cell = _next_cell(cell, token_id)
        return logits_of(cell, self.vocab_size)


def cell_of(cells: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a cell of the cache holds of token ids, or of the hashes of the layer before."""
    return cells % _CELL


def hashes_of(cells: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The hash of a request up to each of its positions, from the cells and positions that its cache holds."""
    return np.cumsum(_mix(_place(cells, places, np.arange(len(cells)))))


def logits_of(x: int, vocab_size: int) -> F32:
    """The logits that follow a hash: `[V]` float32."""
    return (_spread(x, np.arange(vocab_size)) * (_TOP / _CELL)).astype(np.float32)


def _mix(x: Any) -> Any:
    """31 bits well stirred, of integers below 2**31: Python's, NumPy's or torch's."""
    x = ((x ^ x >> 15) * 0x2C1B3C6D) & _MASK
    x = ((x ^ x >> 12) * 0x297A2D39) & _MASK
    return x ^ x >> 15


def _place(token: Any, position: Any, index: Any) -> Any:
    return (token * _TOKEN + position * _PLACE + index * _INDEX + _START) & _MASK


def _next_cell(cell: Any, token: Any) -> Any:
    return _mix((_mix(cell) + token * _TOKEN + _START) & _MASK) % _CELL


def _spread(x: Any, ids: Any) -> Any:
    """Numbers below 2**24, one a token id, made of a hash."""
    return _mix((_mix(x & _MASK) + ids * _PLACE) & _MASK) % _CELL


def _logits(hidden: Tensor, vocab_size: int) -> Tensor:
    import torch

    ids = torch.arange(vocab_size, device=hidden.device)
    made = _spread(hidden.nan_to_num(0).long(), ids).double() * (_TOP / _CELL)
    return (made + 0 * hidden).float()  # NaN stays NaN


def _asked(made: Mapping[str, Tensor], taps: tuple[str, ...]) -> dict[str, Tensor]:
    for name in taps:
        if name not in made:
            raise ValueError(f"no tap {name!r}: this model has {', '.join(made)}")
    return {name: made[name] for name in taps}


def _if_real(meta: DeviceMeta, x: Tensor) -> Tensor:
    """`x [Tp]` as float64, NaN for padded tokens: whoever reads one of them finds out."""
    return x.double().masked_fill(meta.slot_mapping < 0, float("nan"))


def _write(kernels: Kernels, layer: LayerKV, meta: DeviceMeta, cells: Tensor, positions: Tensor) -> None:
    k, v = (_if_real(meta, each).float()[:, None, None] for each in (cells, positions))
    kernels.write_kv(layer, k, v, meta.slot_mapping)


def _read(pages: Tensor, meta: DeviceMeta, requests: Tensor, positions: Tensor) -> Tensor:
    """The cells at some positions of some requests, found through the block table; float64, NaN as it is found."""
    block_size = pages.shape[2]
    blocks = meta.block_table[requests, positions // block_size].long()
    return pages.reshape(-1)[blocks * block_size + positions % block_size].double()


def _request_of_token(meta: DeviceMeta, num_tokens: int) -> Tensor:
    """`[Tp]`; padded tokens count as the last request's."""
    import torch

    ends = meta.query_start_loc[1:]
    at = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1)


def _prefix_hashes(layer: LayerKV, meta: DeviceMeta, positions: Tensor) -> Tensor:
    """For each token the hash of all cells of its request up to its own: `[Tp]` float64, NaN if a cell holds NaN."""
    import torch

    width = meta.block_table.shape[1] * layer.k.shape[2]
    index = torch.arange(width, device=positions.device)
    requests = torch.arange(len(meta.seq_lens), device=positions.device)[:, None]
    cells, places = (_read(pages, meta, requests, index) for pages in (layer.k, layer.v))
    mixed = _mix(_place(cells.nan_to_num(0).long(), places.nan_to_num(0).long(), index))
    known = index < meta.seq_lens[:, None]
    hashes = torch.where(known, mixed + 0 * (cells + places), 0.0).cumsum(1)
    return _if_real(meta, hashes[_request_of_token(meta, len(positions)), positions.long()])


def _rolled(layer: LayerKV, meta: DeviceMeta, x: DeviceInputs) -> Tensor:
    """The cells of the batch's tokens, each made from the one before it: `[Tp]` float64."""
    import torch

    starts, ends = meta.query_start_loc[:-1].long(), meta.query_start_loc[1:].long()
    last = len(x.token_ids) - 1
    before = x.positions[starts.clamp(max=last)].long() - 1
    found = _read(layer.k, meta, torch.arange(len(before), device=before.device), before.clamp(min=0))
    cells = torch.where(before >= 0, found, 0.0)
    made = torch.full((last + 1,), float("nan"), dtype=torch.float64, device=before.device)
    for turn in range(meta.host.max_query_len):
        at = starts + turn
        rolled = _next_cell(cells.nan_to_num(0).long(), x.token_ids[at.clamp(max=last)].long()) + 0 * cells
        made[at[at < ends]] = rolled[at < ends]
        cells = rolled
    return made
