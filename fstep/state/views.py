"""A batch and a block pool as plain arrays, whoever made them: what the checks of `fstep.ops.checks` look at."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from fstep.state.arrays import I32, Bool, i32
from fstep.state.plan import Tail


@frozen(eq=False)
class BatchArrays:
    """A batch as plain arrays: `T` real tokens of `B` real requests, padded to `Tp` and `Bp`, in `G` KV groups."""

    row_of_token: I32  #: [T], the request of each real token, counted in the batch
    positions: I32  #: [Tp]
    query_start_loc: I32  #: [Bp + 1]
    seq_lens: I32  #: [Bp]
    logits_indices: I32  #: [L]
    slot_mapping: tuple[I32, ...]  #: G of [Tp]
    block_tables: tuple[I32, ...]  #: G of [Bp, W]
    block_sizes: tuple[int, ...]  #: G, tokens
    num_computed_tokens: I32  #: [B], before the step
    discard: Bool  #: [B]
    num_known_tokens: I32  #: [B], prompt and output before the step
    request_ids: tuple[str, ...] = ()  #: [B], for messages
    tail: Tail = Tail.REPEAT  #: what the kernels want behind the real requests of `query_start_loc`

    @property
    def num_reqs(self) -> int:
        return len(self.num_computed_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.row_of_token)

    def where(self, b: int) -> str:
        if b >= self.num_reqs:
            return f"padded row {b}"
        return f"row {b} (request {self.request_ids[b]!r})" if self.request_ids else f"row {b}"


@frozen(eq=False)
class PoolView:
    """The blocks of one KV group: which are free, and which each request holds."""

    num_blocks: int  #: with the null block 0
    free: I32
    held: Mapping[str, I32]  #: by request
    cached: I32 = field(factory=lambda: i32(()))  #: held by nobody, not in `free`, and kept for their content
    ref_counts: I32 | None = None  #: [num_blocks], how many requests hold each; None: blocks are not shared
