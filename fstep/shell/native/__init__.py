"""Kernels in C: what a float32 model runs on where the library in this folder was built.

`kernels.c` is compiled when fstep is installed, if there is a C compiler, for every instruction set that it knows of;
the best one of the processor is used. Sums run in an order that depends on their length alone, so the bits of a token
don't depend on its batch, its chunks or the number of threads. What isn't float32 goes to `TorchKernels`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from fstep.shell.torch_kernels import TorchKernels
from fstep.state import I32, AttentionSpec, DeviceMeta, LayerKV, frozen_array, ragged_arange

ISAS = ("plain", "avx2", "avx512")
MOST_QUERIES = 16  #: of a request in one attention task
MOST_SCORES = 1 << 14  #: queries times positions of such a task, for each query head that shares its KV head


@frozen
class Library:
    """The compiled kernels, and the instruction set that they are to use."""

    path: Path
    isa: int  #: index in `ISAS`
    lanes: int = field(init=False)  #: floats of a vector
    c: ctypes.CDLL = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "c", ctypes.CDLL(str(self.path)))
        object.__setattr__(self, "lanes", self.c.fstep_lanes(self.isa))

    def call(self, name: str, args: ctypes.Structure, *more: object) -> None:
        """One function over a structure of arguments, on as many threads as torch uses."""
        getattr(self.c, name)(self.isa, torch.get_num_threads(), ctypes.byref(args), *more)


def load_library(isa: str | None = None) -> Library | None:
    """The library in this folder, for the best instruction set or a named one; None if it wasn't built."""
    path = next(Path(__file__).parent.glob("_kernels*.so"), None)
    if path is None:
        return None
    _share_openmp()
    return Library(path, ctypes.CDLL(str(path)).fstep_isa() if isa is None else ISAS.index(isa))


def _share_openmp() -> None:
    """Lets the library find the OpenMP that torch has loaded, whose threads it works on."""
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _structure(name: str, pointers: str, numbers: str, floats: str = "") -> type[ctypes.Structure]:
    """The twin of a structure in `kernels.c`: pointers, then int64, then float."""
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (floats, ctypes.c_float))
    fields = [(each, kind) for names, kind in kinds for each in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


_Packing = _structure("Packing", "weight packed", "out in")
_Product = _structure("Product", "x packed bias y", "rows in out x_stride rows_each panels_each")
_Norm = _structure("Norm", "x more weight sum y", "rows width x_stride", "eps")
_Silu = _structure("Silu", "x y", "rows width")
_Rotation = _structure("Rotation", "x cos sin", "tokens heads head_dim x_stride")
_Attention = _structure(
    "Attention", "q k v y block_table tasks", "q_stride table_width heads kv_heads head_dim block_size", "scale"
)


@frozen(eq=False)
class PackedWeight:
    """A matrix `[out, in]` as panels of `2 * lanes` rows, each column by column; the last is filled up with zeros."""

    packed: Tensor  #: [ceil(out / panel) * panel * in] float32
    out: int
    columns: int


@frozen(eq=False)
class _Tasks:
    """Queries of one request that are attended together: its row in the batch, first token, tokens, and how many
    positions the first of them sees."""

    table: I32  #: [n, 4]
    most_queries: int
    most_positions: int


@frozen
class NativeKernels(TorchKernels):
    """The kernels of `library`, over the same cache as those in torch."""

    library: Library

    @property
    def name(self) -> str:
        return f"native {ISAS[self.library.isa]}"

    def plan(self, meta: DeviceMeta, num_kv_heads: int, block_size: int) -> object:  # noqa: ARG002 - of the cache alone
        """The tasks of attention."""
        host = meta.host
        first, end = host.query_start_loc[: host.num_reqs], host.query_start_loc[1 : host.num_reqs + 1]
        return _tasks(first, end - first, host.seq_lens[: host.num_reqs])

    def weight(self, matrix: Tensor) -> Any:
        """The matrix in panels, if it is float32."""
        if matrix.dtype != torch.float32 or matrix.ndim != 2:
            return matrix
        matrix, (out, columns), panel = matrix.contiguous(), matrix.shape, 2 * self.library.lanes
        packed = torch.empty(-(-out // panel) * panel * columns)
        self.library.call("fstep_pack", _Packing(matrix.data_ptr(), packed.data_ptr(), out, columns))
        return PackedWeight(packed, out, columns)

    def linear(self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
        """`x [Tp, in]` times the weight `[out, in]`, transposed, plus `bias [out]`: `[Tp, out]`."""
        if not isinstance(weight, PackedWeight):
            return super().linear(x, weight, bias)
        x = _row_by_row(x)
        y = torch.empty((len(x), weight.out))
        args = (x.data_ptr(), weight.packed.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
        self.library.call("fstep_product", _Product(*args, len(x), weight.columns, weight.out, x.stride(0)))
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension."""
        if x.ndim != 2 or x.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        x = _row_by_row(x)
        y = torch.empty(x.shape)
        args = (x.data_ptr(), 0, weight.data_ptr(), 0, y.data_ptr())
        self.library.call("fstep_norm", _Norm(*args, *x.shape, x.stride(0), eps))
        return y

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x + more`, and its norm."""
        if x.ndim != 2 or x.dtype != torch.float32:
            return super().add_rms_norm(x, more, weight, eps)
        x, more = _row_by_row(x), more.contiguous()
        total, y = torch.empty(x.shape), torch.empty(x.shape)
        args = (x.data_ptr(), more.data_ptr(), weight.data_ptr(), total.data_ptr(), y.data_ptr())
        self.library.call("fstep_norm", _Norm(*args, *x.shape, x.stride(0), eps))
        return total, y

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`heads [Tp, n, head_dim]`, turned where they lie."""
        if heads.dtype != torch.float32 or heads.stride()[1:] != (heads.shape[2], 1):
            return super().rotate(heads, cos, sin)
        cos, sin = cos.contiguous(), sin.contiguous()
        args = (heads.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self.library.call("fstep_rotate", _Rotation(*args, *heads.shape, heads.stride(0)))
        return heads

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu of the first half of `x [Tp, 2 n]` times the second half: `[Tp, n]`."""
        if x.dtype != torch.float32:
            return super().silu_mul(x)
        x = x.contiguous()
        y = torch.empty((len(x), x.shape[1] // 2))
        self.library.call("fstep_silu", _Silu(x.data_ptr(), y.data_ptr(), *y.shape))
        return y

    def write_kv(self, layer: LayerKV, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Puts `k` and `v`, `[Tp, num_kv_heads, head_dim]`, at `slots [Tp]`; slot -1 is dropped."""
        _, num_kv_heads, block_size, head_dim = layer.k.shape
        if not _float32(layer.k, k, v):
            super().write_kv(layer, k, v, slots)
            return
        k, v = _token_by_token(k), _token_by_token(v)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (k, v, slots, layer.k, layer.v)]
        numbers = (k.stride(0), v.stride(0), len(slots), num_kv_heads, head_dim, block_size)
        strides, sizes = map(ctypes.c_int64, numbers[:2]), map(ctypes.c_int64, numbers[2:])
        self.library.c.fstep_write_kv(*pointers[:2], *strides, pointers[2], *sizes, *pointers[3:])

    def attention(self, q: Tensor, layer: LayerKV, meta: DeviceMeta, spec: AttentionSpec) -> Tensor:
        """Causal attention of `q [Tp, num_heads, head_dim]` over the cache: the same shape, 0 for padded tokens."""
        lanes, head_dim, block_size = self.library.lanes, spec.head_dim, layer.k.shape[2]
        if not _float32(q, layer.k, layer.v) or head_dim % lanes:
            return super().attention(q, layer, meta, spec)
        plan = meta.plan if isinstance(meta.plan, _Tasks) else self.plan(meta, spec.num_kv_heads, block_size)
        assert isinstance(plan, _Tasks)
        q = _token_by_token(q)
        y = torch.empty(q.shape)
        y[meta.host.num_tokens :] = 0
        rows, strip = plan.most_queries * (spec.num_heads // spec.num_kv_heads), 4 * lanes
        each = head_dim * (strip + lanes + rows) + rows * (1 + -(-plan.most_positions // strip) * strip)
        scratch = torch.empty(each * torch.get_num_threads())
        table = meta.block_table
        tensors = (q, layer.k, layer.v, y, table)
        pointers = (*(tensor.data_ptr() for tensor in tensors), plan.table.ctypes.data)
        numbers = (q.stride(0), table.shape[1], spec.num_heads, spec.num_kv_heads, head_dim, block_size, spec.scale)
        more = (ctypes.c_int64(len(plan.table)), ctypes.c_void_p(scratch.data_ptr()), ctypes.c_int64(each))
        self.library.call("fstep_attention", _Attention(*pointers, *numbers), *more)
        return y


def _float32(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 for tensor in tensors)


def _row_by_row(x: Tensor) -> Tensor:
    """`x [rows, width]`, every row without gaps."""
    return x if x.stride(1) == 1 else x.contiguous()


def _token_by_token(x: Tensor) -> Tensor:
    """`x [Tp, heads, head_dim]`, every token without gaps."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _tasks(first: I32, counts: I32, seq_lens: I32) -> _Tasks:
    """The tokens of each request, from `first [B]` on `counts [B]` of them, cut into tasks."""
    most = np.clip(MOST_SCORES // np.maximum(seq_lens, 1), 1, MOST_QUERIES).astype(np.int32)
    parts = -(-counts // most)
    request = np.repeat(np.arange(len(counts), dtype=np.int32), parts)
    done = ragged_arange(np.zeros(len(counts), np.int32), parts).astype(np.int32) * most[request]
    queries = np.minimum(counts[request] - done, most[request])
    seen = (seq_lens - counts)[request] + done + 1
    table = np.stack((request, first[request] + done, queries, seen), axis=1, dtype=np.int32)
    some = len(table) > 0
    return _Tasks(frozen_array(table), int(queries.max()) if some else 0, int((seen + queries).max()) if some else 0)
