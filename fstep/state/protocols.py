"""The protocols between the rooms: what a model, a device, its kernels and a KV cache are to the step.

`Tp` tokens and `Bp` requests after padding, `L` logits rows, `V` vocabulary, `H` hidden size, `W` blocks of the widest
table. Tensors are on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from attrs import field, frozen

from fstep.state.arrays import I32
from fstep.state.step import AttentionMeta, Inputs

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor: TypeAlias = Any

_T_co = TypeVar("_T_co", covariant=True)

Tree: TypeAlias = Mapping[str, Any]  #: nested mappings and tuples of tensors


#: Bytes of a number in a KV cache; "fp8" is any torch dtype of eight bits.
DTYPE_BYTES: Final = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1})


@frozen
class LayerSpec:
    """The KV that one layer keeps for a token: K and V, `[num_kv_heads, head_dim]` each."""

    num_kv_heads: int
    head_dim: int
    group: int = 0  #: index of the layer's KV group
    dtype: str = "float32"  #: a torch dtype by name

    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@frozen
class AttentionSpec:
    """How one layer attends: causal, `num_heads // num_kv_heads` query heads share a KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@frozen(eq=False)
class LayerKV:
    """The paged cache of one layer. Slot `s` is token `s % block_size` of block `s // block_size`."""

    k: Tensor  #: [num_blocks, num_kv_heads, block_size, head_dim]
    v: Tensor  #: [num_blocks, num_kv_heads, block_size, head_dim]


@frozen(eq=False)
class DeviceMeta:
    """`AttentionMeta` on the device, with the host's copy beside it (some kernels need host lengths)."""

    host: AttentionMeta
    query_start_loc: Tensor  #: [Bp + 1] int32
    seq_lens: Tensor  #: [Bp] int32
    slot_mapping: Tensor  #: [Tp] int32
    block_table: Tensor  #: [Bp, W] int32
    plan: object = None  #: what the kernels worked out once for all layers of the step (`Kernels.plan`)


@frozen(eq=False)
class DeviceInputs:
    """What a model reads of a step."""

    token_ids: Tensor  #: [Tp] int32
    positions: Tensor  #: [Tp] int32
    logits_indices: Tensor  #: [L] int32
    groups: tuple[DeviceMeta, ...]  #: one a KV group


@frozen(eq=False)
class Hidden:
    """The last hidden states of a batch, and the intermediates that were asked for by name."""

    states: Tensor  #: [Tp, H]
    taps: Mapping[str, Tensor] = field(factory=dict[str, Tensor])  #: [Tp, …] each


class KV(Protocol):
    """A handle on a KV cache: linear. `forward` takes one and returns the next; the old one is dead from then on.

    Every use of a dead handle raises `DonatedError`.
    """

    @property
    def line(self) -> int: ...
    @property
    def epoch(self) -> int:
        """How many forwards the line has seen."""
        ...

    @property
    def origin(self) -> tuple[int, int] | None:
        """The line and epoch that this line was cloned from."""
        ...

    @property
    def written(self) -> Inputs | None:
        """The batch of the newest forward, which may be repeated."""
        ...

    @property
    def layers(self) -> tuple[LayerKV, ...]: ...

    def advance(self, epoch: int, inputs: Inputs) -> KV:
        """Kills this handle and returns the next one, which has seen `inputs` written."""
        ...

    def copy_blocks(self, copies: tuple[I32, ...]) -> None:
        """Copies whole blocks, `[n, 2]` from and to in each KV group; `forward` calls it before anything is written."""
        ...

    def clone(self) -> KV:
        """A copy on a line of its own; both live on."""
        ...


class Kernels(Protocol):
    """The operations that need to know the device or the pages."""

    def plan(self, meta: DeviceMeta, num_kv_heads: int, block_size: int) -> object:
        """What `attention` can work out once for all layers of a group: goes into `DeviceMeta.plan`."""
        ...

    def write_kv(self, layer: LayerKV, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Puts `k` and `v`, `[Tp, num_kv_heads, head_dim]`, at `slots [Tp]`; slot -1 is dropped."""
        ...

    def attention(self, q: Tensor, layer: LayerKV, meta: DeviceMeta, spec: AttentionSpec) -> Tensor:
        """Causal attention of `q [Tp, num_heads, head_dim]` over the cache: the same shape."""
        ...

    def weight(self, matrix: Tensor) -> Any:
        """A matrix `[out, in]` in the form in which `linear` reads it best; the matrix as it is will do as well."""
        ...

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """`x [Tp, in]` times `weight [out, in]`, transposed, plus `bias [out]`: `[Tp, out]`, strides as it suits."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (Zhang & Sennrich 2019), worked out in float32: as `x`."""
        ...

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x + more`, `[Tp, H]`, and its norm."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions: `heads [Tp, n, head_dim]`, turned by `cos [Tp, 1, head_dim]`, `sin [Tp, 1, head_dim / 2]`.

        The halves of a head are the two coordinates. May write over `heads`.
        """
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """silu of the first half of `x [Tp, 2 n]` times the second half: `[Tp, n]`."""
        ...


class Model(Protocol):
    """A language model as pure functions over a parameter tree.

    `hidden` must write each layer's K and V to the cache before it attends, and look at other tokens through the
    cache alone: that makes it continue any chunk of any request.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        """What each layer keeps, in the order of `KV.layers`."""
        ...

    def hidden(self, params: Tree, x: DeviceInputs, kv: KV, kernels: Kernels, taps: tuple[str, ...] = ()) -> Hidden:
        """The last hidden state of every token.

        Raises `ValueError` for a tap that the model doesn't have, naming those it has.
        """
        ...

    def logits(self, params: Tree, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Logits of some hidden states `[L, H]`: `[L, V]` float32."""
        ...


class Future(Protocol[_T_co]):
    """A value on its way from a device."""

    def ready(self) -> bool: ...
    def wait(self) -> _T_co: ...


class Device(Protocol):
    """Where the arrays of a step live, and the few verbs that it takes to get them there and back."""

    @property
    def name(self) -> str: ...
    @property
    def kernels(self) -> Kernels: ...

    def allocate(self, nbytes: int, align: int = 64) -> Tensor:
        """`[nbytes]` uint8, its address a multiple of `align`, not written to yet."""
        ...

    def put(self, arrays: tuple[I32, ...]) -> tuple[Tensor, ...]:
        """Copies of host arrays on the device, in one packed transfer."""
        ...

    def get(self, tensors: tuple[Tensor, ...]) -> Future[tuple[I32, ...]]:
        """Copies of int32 tensors on the host, in one packed transfer."""
        ...


@frozen(eq=False)
class Env:
    """What `forward` and `sample` need from outside the state."""

    model: Model
    params: Tree
    device: Device
    weights_version: int = 0
