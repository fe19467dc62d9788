"""The paged KV cache: memory that is written in place, behind handles that are used up one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from fstep.state import Bool, Device, DonatedError, Inputs, LayerKV, LayerSpec, Plan


@frozen(eq=False)
class _Pages:
    """The memory of one line: what its handles share."""

    layers: tuple[LayerKV, ...]
    groups: tuple[int, ...]  #: the KV group of each layer
    block_sizes: tuple[int, ...]  #: of each group
    touched: tuple[Bool, ...]  #: of each group, [num_blocks]: the blocks that were ever written to
    lines: Iterator[int]  #: the line numbers that are still free


@define(eq=False)
class KVCache:
    """A handle on the cache (see `fstep.state.KV`): good for one `forward`, which returns the next one."""

    _pages: _Pages
    _line: int
    _epoch: int = 0
    _written: Inputs | None = None
    _origin: tuple[int, int] | None = None
    _alive: bool = field(default=True, init=False)

    def __repr__(self) -> str:
        alive = "" if self._alive else ", donated"
        return f"KVCache(line {self._line}, epoch {self._epoch}, {self.nbytes / 2**20:.0f} MiB{alive})"

    @property
    def line(self) -> int:
        return self._usable()._line

    @property
    def epoch(self) -> int:
        return self._usable()._epoch

    @property
    def origin(self) -> tuple[int, int] | None:
        return self._usable()._origin

    @property
    def written(self) -> Inputs | None:
        return self._usable()._written

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        return self._usable()._pages.layers

    @property
    def nbytes(self) -> int:
        """The size of the cache over all layers, in bytes."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self._pages.layers)

    def advance(self, epoch: int, inputs: Inputs) -> KVCache:
        """Kills this handle and returns the next one, which has seen `inputs` written."""
        pages = self._usable()._pages
        for touched, slots, block_size in zip(pages.touched, inputs.slot_mapping, pages.block_sizes, strict=True):
            touched[slots[slots >= 0] // block_size] = True
        self._alive = False
        return KVCache(pages, self._line, epoch, inputs, self._origin)

    def clone(self) -> KVCache:
        """A copy on a line of its own, of the blocks that were ever written to; both lines live on."""
        pages = self._usable()._pages
        layers = tuple(
            LayerKV(_copy(layer.k, pages.touched[group]), _copy(layer.v, pages.touched[group]))
            for layer, group in zip(pages.layers, pages.groups, strict=True)
        )
        touched = tuple(each.copy() for each in pages.touched)
        copy = _Pages(layers, pages.groups, pages.block_sizes, touched, pages.lines)
        return KVCache(copy, next(pages.lines), self._epoch, self._written, (self._line, self._epoch))

    def _usable(self) -> KVCache:
        if not self._alive:
            raise DonatedError(
                f"this KV handle (line {self._line}, epoch {self._epoch}) was given to forward already. Go on with the "
                "handle that forward returned: not `forward(state, env, kv)` twice with one kv, but "
                "`state, kv = forward(state, env, kv)`"
            )
        return self


def new_kv(plan: Plan, specs: tuple[LayerSpec, ...], device: Device) -> KVCache:
    """A cache for a plan's groups and a model's layers; its memory is not touched until something is written.

    K and V are `[num_blocks, num_kv_heads, block_size, head_dim]` for each layer.
    """
    groups = tuple(spec.group for spec in specs)
    layers = tuple(LayerKV(_pages(plan, spec, device), _pages(plan, spec, device)) for spec in specs)
    touched = tuple(np.zeros(group.num_blocks, np.bool_) for group in plan.groups)
    lines = count()
    line = next(lines)
    return KVCache(_Pages(layers, groups, tuple(group.block_size for group in plan.groups), touched, lines), line)


def _pages(plan: Plan, spec: LayerSpec, device: Device) -> Tensor:
    group = plan.groups[spec.group]
    shape = (group.num_blocks, spec.num_kv_heads, group.block_size, spec.head_dim)
    nbytes = group.num_blocks * group.block_size * spec.bytes_per_token() // 2
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return device.allocate(nbytes).view(dtype).view(shape)


def _copy(pages: Tensor, touched: Bool) -> Tensor:
    copy = torch.empty_like(pages)
    at = torch.as_tensor(np.nonzero(touched)[0]).to(pages.device)
    return copy.index_copy_(0, at, pages.index_select(0, at))
