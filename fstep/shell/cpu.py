"""The CPU as a device."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from fstep.shell.native import NativeKernels, load_library
from fstep.shell.torch_kernels import TorchKernels
from fstep.state import I32, DeviceError, Kernels, frozen_array

_T = TypeVar("_T")


def cpu_kernels() -> Kernels:
    """The kernels in C where they were built, else those in torch."""
    library = load_library()
    return TorchKernels() if library is None else NativeKernels(library)


@frozen(eq=False)
class Arrived(Generic[_T]):
    """A `Future` whose value is there."""

    value: _T

    def ready(self) -> bool:
        return True

    def wait(self) -> _T:
        return self.value


@frozen
class CpuDevice:
    """The CPU: a device whose every verb is done when it returns."""

    name: str = field(default="cpu", init=False)
    kernels: Kernels = field(factory=lambda: cpu_kernels())

    def allocate(self, nbytes: int, align: int = 64) -> Tensor:
        """`[nbytes]` uint8, its address a multiple of `align`, not written to yet.

        Raises `DeviceError` if there is no such memory.
        """
        if nbytes < 0 or align < 1:
            raise DeviceError(f"allocate: nbytes={nbytes} must be at least 0, align={align} at least 1")
        try:
            raw = torch.empty(nbytes + align - 1, dtype=torch.uint8)
        except (RuntimeError, MemoryError):
            raise DeviceError(f"allocate: nbytes={nbytes} is more memory than the CPU gives") from None
        return raw[-raw.data_ptr() % align :][:nbytes]

    def put(self, arrays: tuple[I32, ...]) -> tuple[Tensor, ...]:
        """Copies of int32 host arrays: views of one buffer, filled by one copy."""
        if not arrays:
            return ()
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int32, casting="no"))  # pyright: ignore[reportUnknownMemberType]
        parts = torch.split(packed, [array.size for array in arrays])
        return tuple(part.view(array.shape) for part, array in zip(parts, arrays, strict=True))

    def get(self, tensors: tuple[Tensor, ...]) -> Arrived[tuple[I32, ...]]:
        """Copies of int32 tensors: read-only views of one array, there at once."""
        if not tensors:
            return Arrived(())
        packed: I32 = frozen_array(torch.cat([tensor.flatten() for tensor in tensors]).numpy())
        ends = np.cumsum([tensor.numel() for tensor in tensors])
        parts = np.split(packed, ends[:-1])
        return Arrived(tuple(part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)))
