"""The KV cache: pages that are written in place, behind a handle that can be used once.

`forward` takes a handle and returns the next one, as a donated buffer does in JAX; the pages stay where they are. A
clone has pages of its own, so two lines of states can go on from the same place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from attrs import define, frozen
from numpy.typing import NDArray
from torch import Tensor

from fstep.state import I32, Bool, ConfigError, Device, DonatedError, Inputs, LayerKV, LayerSpec, Plan


@frozen(eq=False)
class _Pages:
    """The memory of one line, which all its handles share."""

    plan: Plan
    specs: tuple[LayerSpec, ...]
    device: Device
    layers: tuple[LayerKV, ...]
    touched: tuple[Bool, ...]  #: one a KV group, [num_blocks]: blocks that were ever written; changed in place
    lines: Iterator[int]  #: the line numbers that are left, for all clones of a cache


@define(eq=False, repr=False)
class KVCache:
    """A handle on the K and V of every layer; see `KV`. Made by `new_kv`, by `advance` and by `clone`.

    Every use of a handle that was given to `forward` raises `DonatedError`.
    """

    _pages: _Pages | None
    _line: int
    _epoch: int = 0
    _origin: tuple[int, int] | None = None
    _written: Inputs | None = None

    @property
    def line(self) -> int:
        self._live()
        return self._line

    @property
    def epoch(self) -> int:
        """How many forwards the line has seen, with those of the lines that it was cloned from."""
        self._live()
        return self._epoch

    @property
    def origin(self) -> tuple[int, int] | None:
        """The line and epoch that this is a clone of; None once the clone has gone on to an epoch of its own."""
        self._live()
        return self._origin

    @property
    def written(self) -> Inputs | None:
        """The batch of the newest forward, which may be repeated."""
        self._live()
        return self._written

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        return self._live().layers

    @property
    def nbytes(self) -> int:
        """Bytes of K and V over all layers, written or not."""
        return sum(pages.nbytes for layer in self.layers for pages in (layer.k, layer.v))

    def advance(self, epoch: int, inputs: Inputs) -> KVCache:
        """Kills this handle and returns the next one, which has seen `inputs` written; `forward` calls it."""
        pages = self._live()
        for touched, group, slots in zip(pages.touched, pages.plan.groups, inputs.slot_mapping, strict=True):
            touched[slots[slots >= 0] // group.block_size] = True
        self._pages = None
        return KVCache(pages, self._line, epoch, self._origin if epoch == self._epoch else None, inputs)

    def copy_blocks(self, copies: tuple[I32, ...]) -> None:
        """Copies whole blocks, `[n, 2]` from and to in each KV group; `forward` calls it before anything is written."""
        pages = self._live()
        for touched, pairs in zip(pages.touched, copies, strict=True):
            touched[pairs[:, 1]] = True
        for spec, layer in zip(pages.specs, pages.layers, strict=True):
            source, copy = _on_device(copies[spec.group].T, layer)
            for each in (layer.k, layer.v):
                each.index_copy_(0, copy, each.index_select(0, source))

    def export(self, slots: tuple[I32, ...]) -> tuple[LayerKV, ...]:
        """Copies of what lies at some slots, one array a KV group: for each layer `[n, num_kv_heads, head_dim]`."""
        pages = self._live()
        made: list[LayerKV] = []
        for spec, layer in zip(pages.specs, pages.layers, strict=True):
            block, offset = _on_device(np.divmod(slots[spec.group], layer.k.shape[2]), layer)
            made.append(LayerKV(layer.k[block, :, offset].cpu(), layer.v[block, :, offset].cpu()))
        return tuple(made)

    def filled(self, slots: tuple[I32, ...], layers: tuple[LayerKV, ...]) -> KVCache:
        """Kills this handle and returns the next one, with what `export` gave at some slots that nobody owns."""
        pages = self._live()
        for touched, group, at in zip(pages.touched, pages.plan.groups, slots, strict=True):
            touched[at // group.block_size] = True
        for spec, layer, new in zip(pages.specs, pages.layers, layers, strict=True):
            block, offset = _on_device(np.divmod(slots[spec.group], layer.k.shape[2]), layer)
            layer.k[block, :, offset], layer.v[block, :, offset] = new.k.to(block.device), new.v.to(block.device)
        self._pages = None
        return KVCache(pages, self._line, self._epoch + 1)

    def clone(self) -> KVCache:
        """A copy on a line of its own; both live on. Only blocks that were ever written are copied."""
        pages = self._live()
        touched = tuple(each.copy() for each in pages.touched)
        layers = _allocate(pages.plan, pages.specs, pages.device)
        for spec, source, copy in zip(pages.specs, pages.layers, layers, strict=True):
            blocks = torch.from_numpy(np.flatnonzero(touched[spec.group])).to(source.k.device)  # pyright: ignore[reportUnknownMemberType]
            copy.k.index_copy_(0, blocks, source.k.index_select(0, blocks))
            copy.v.index_copy_(0, blocks, source.v.index_select(0, blocks))
        copied = _Pages(pages.plan, pages.specs, pages.device, layers, touched, pages.lines)
        return KVCache(copied, next(pages.lines), self._epoch, (self._line, self._epoch), self._written)

    def __repr__(self) -> str:
        if self._pages is None:
            return f"KVCache(line {self._line}, epoch {self._epoch}, donated)"
        used = ", ".join(f"{touched.sum()} of {len(touched)} blocks written" for touched in self._pages.touched)
        return f"KVCache(line {self._line}, epoch {self._epoch}, {used}, {self.nbytes / 2**20:.1f} MiB)"

    def _live(self) -> _Pages:
        if self._pages is None:
            raise DonatedError(
                f"this KV handle (line {self._line}, epoch {self._epoch}) was given to forward() already, and is dead. "
                "Go on with the one that came back: `state, kv = forward(state, env, kv)`; "
                "to keep a copy as well, `kv.clone()` before."
            )
        return self._pages


def new_kv(plan: Plan, specs: Sequence[LayerSpec], device: Device) -> KVCache:
    """An empty cache: K and V of each layer `[num_blocks, num_kv_heads, block_size, head_dim]`, as its group says.

    The memory is asked for and not touched. Raises `ConfigError` for a layer whose group the plan doesn't have,
    `DeviceError` if the device hasn't got the memory.
    """
    for number, spec in enumerate(specs):
        if not 0 <= spec.group < len(plan.groups):
            raise ConfigError(f"specs[{number}].group", spec.group, f"the plan has {len(plan.groups)} KV groups")
    lines = count()
    touched = tuple(np.zeros(group.num_blocks, np.bool_) for group in plan.groups)
    layers = _allocate(plan, tuple(specs), device)
    return KVCache(_Pages(plan, tuple(specs), device, layers, touched, lines), next(lines))


def _on_device(arrays: Iterable[NDArray[Any]], layer: LayerKV) -> tuple[Tensor, Tensor]:
    """Two index arrays where a layer is."""
    first, second = (torch.from_numpy(np.ascontiguousarray(each, np.int64)).to(layer.k.device) for each in arrays)  # pyright: ignore[reportUnknownMemberType]
    return first, second


def _allocate(plan: Plan, specs: tuple[LayerSpec, ...], device: Device) -> tuple[LayerKV, ...]:
    def pages(spec: LayerSpec) -> Tensor:
        group = plan.groups[spec.group]
        shape = (group.num_blocks, spec.num_kv_heads, group.block_size, spec.head_dim)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return device.allocate(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    return tuple(LayerKV(pages(spec), pages(spec)) for spec in specs)
