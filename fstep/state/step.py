"""The products of one step, phase by phase. Each phase adds one; the next `prepare` drops them all.

`B` scheduled requests, `T` tokens, `L` logits rows (1 + drafts a request), `K` drafts, `V` vocabulary, `W` blocks of
the widest table; `Bp` and `Tp` are `B` and `T` after padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import field, frozen

from fstep.state.arrays import I32, Bool, Intp
from fstep.state.errors import PhaseError
from fstep.state.plan import BatchDescriptor
from fstep.state.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = Any  #: NumPy on the host, torch on the device
_T = TypeVar("_T")


@frozen(eq=False)
class Inputs:
    """The batch of a step, made by `prepare`: flat over tokens, the requests one after the other."""

    rows: Intp  #: [B], the row of each request
    num_scheduled_tokens: I32  #: [B]
    query_start_loc: I32  #: [B + 1], where each request's tokens start; ends at T
    seq_lens: I32  #: [B], computed + scheduled tokens
    token_ids: I32  #: [T]
    positions: I32  #: [T], index of each token in its sequence
    slot_mapping: tuple[I32, ...]  #: one a KV group, [T]: where each token's KV goes, block * block_size + offset
    logits_indices: I32  #: [L], the tokens whose logits are asked for
    sample_positions: I32  #: [L], the index in its sequence of the token to be drawn
    discard: Bool  #: [B], the request's prompt is not complete: nothing is drawn


@frozen(eq=False)
class Padding:
    """The batch at the size at which it runs, made by `pad`. Padded tokens have slot -1, padded requests length 0."""

    descriptor: BatchDescriptor  #: Tp and Bp
    num_tokens: int  #: T
    num_reqs: int  #: B
    query_start_loc: I32  #: [Bp + 1]
    seq_lens: I32  #: [Bp]
    token_ids: I32  #: [Tp], 0 in the tail
    positions: I32  #: [Tp], 0 in the tail
    slot_mapping: tuple[I32, ...]  #: one a KV group, [Tp], -1 in the tail


@frozen(eq=False)
class AttentionMeta:
    """What attention needs to know of a step, for the layers of one KV group; made by `build_meta`."""

    query_start_loc: I32  #: [Bp + 1]
    seq_lens: I32  #: [Bp]
    slot_mapping: I32  #: [Tp]
    block_table: I32  #: [Bp, W], 0 (the null block) past a request's blocks and in padded rows
    num_reqs: int  #: B
    num_tokens: int  #: T
    max_query_len: int
    max_seq_len: int
    common_prefix_len: int = (
        0  #: tokens in whole blocks that all requests share and have computed: for cascade attention
    )


@frozen
class Meta:
    """One `AttentionMeta` a KV group, and one for each of its attention groups: the same one unless they differ."""

    groups: tuple[AttentionMeta, ...]
    attention: tuple[tuple[AttentionMeta, ...], ...] = ()


@frozen(eq=False)
class Output:
    """What `forward` gives back; on the device."""

    logits: Tensor  #: [L, V] float32
    taps: Mapping[str, Tensor] = field(factory=dict[str, "Tensor"])  #: the intermediates that were asked for, [Tp, …]
    weights_version: int = 0


class SampleError:
    """Codes of `Sampled.error`."""

    NONE = 0
    NO_DISTRIBUTION = 1  #: the logits hold NaN or +inf, or no id is left


@frozen(eq=False)
class Sampled:
    """The tokens that a step drew; on the device after `sample`, on the host before `commit`."""

    token_ids: Array  #: [B, 1 + K], -1 past `num_sampled`
    num_sampled: Array  #: [B], 0 for a discarded or failed request
    error: Array  #: [B], a `SampleError` code


@frozen(eq=False)
class Step:
    """What the phases of the present step have made so far."""

    schedule: Schedule
    inputs: Inputs
    padding: Padding | None = None
    meta: Meta | None = None
    output: Output | None = None
    sampled: Sampled | None = None

    def need_padding(self, phase: str) -> Padding:
        return _need(self.padding, phase, "pad")

    def need_meta(self, phase: str) -> Meta:
        return _need(self.meta, phase, "build_meta")

    def need_output(self, phase: str) -> Output:
        return _need(self.output, phase, "forward")

    def need_sampled(self, phase: str) -> Sampled:
        return _need(self.sampled, phase, "sample")


def _need(made: _T | None, phase: str, needs: str) -> _T:
    if made is None:
        raise PhaseError(phase, needs)
    return made
