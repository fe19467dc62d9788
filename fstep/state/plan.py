"""What is fixed for as long as an engine lives."""

from __future__ import annotations

import enum

from attrs import field, frozen

from fstep.state.errors import ConfigError
from fstep.state.kv_kinds import FullAttention, KVKind


def about(text: str) -> dict[str, str]:
    """Metadata of a field: what `fstep generate --help` says of it."""
    return {"help": text}


class Tail(enum.Enum):
    """What a backend's kernels want in `query_start_loc` past the real rows."""

    REPEAT = "repeat"  #: the token count again: padded rows have no tokens
    CONTINUE = "continue"  #: the padded tokens are dealt to the padded rows, one each, the last takes what is left


@frozen
class RowOrder:
    """In which order a step takes its requests: as the schedule has them, or those that decode first.

    Raises `ConfigError` for a threshold below 1.
    """

    decode_threshold: int | None = None  #: most tokens of a decode, which go first then; None: as scheduled

    def __attrs_post_init__(self) -> None:
        if self.decode_threshold is not None and self.decode_threshold < 1:
            raise ConfigError("decode_threshold", self.decode_threshold, "must be at least 1")


@frozen
class AttentionGroup:
    """Layers of a KV group that one attention backend serves with one metadata.

    Raises `ConfigError` for a kernel's block below 1 token.
    """

    layers: tuple[int, ...] = ()
    kernel_block_size: int | None = None  #: tokens of a block of its table, a divisor of the KV group's; None: as there
    tail: Tail | None = None  #: where it isn't the plan's

    def __attrs_post_init__(self) -> None:
        if self.kernel_block_size is not None and self.kernel_block_size < 1:
            raise ConfigError("kernel_block_size", self.kernel_block_size, "must be at least 1")


@frozen
class KVGroup:
    """Layers that share one block table.

    Raises `ConfigError` for attention groups whose kernel block doesn't divide its own, or whose layers aren't its own.
    """

    num_blocks: int  #: with the null block 0, which is never allocated
    block_size: int  #: tokens
    layers: tuple[int, ...] = ()
    recurrent: bool = False  #: cells are made of earlier ones, which a forward can't read where it writes them
    kind: KVKind = field(factory=FullAttention)  #: what of its tokens a request still needs
    attention: tuple[AttentionGroup, ...] = ()  #: empty: one, of all its layers

    def __attrs_post_init__(self) -> None:
        for each in self.attention:
            if each.kernel_block_size and self.block_size % each.kernel_block_size:
                limit = f"must divide the {self.block_size} tokens of the group's blocks"
                raise ConfigError("kernel_block_size", each.kernel_block_size, limit)
        served = [layer for each in self.attention for layer in each.layers]
        if self.attention and sorted(served) != sorted(self.layers):
            raise ConfigError("layers of the attention groups", served, f"must be the group's {self.layers}, once each")

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one request, whether it still needs them or not."""
        return -(-num_tokens // self.block_size)


@frozen(order=True)
class BatchDescriptor:
    """A shape that steps are padded to; the same value chooses a graph at capture and at dispatch."""

    num_tokens: int
    num_reqs: int


@frozen
class Plan:
    """The limits and shapes of an engine; hashable."""

    vocab_size: int
    max_model_len: int  #: tokens of one request, prompt and output
    groups: tuple[KVGroup, ...]
    eos_token_ids: tuple[int, ...] = ()
    capture: tuple[BatchDescriptor, ...] = ()  #: ascending; empty: nothing is padded
    tail: Tail = Tail.REPEAT
    order: RowOrder = field(factory=RowOrder)
    prefix_caching: bool = True  #: whether full blocks are kept for requests that begin alike


@frozen
class CacheConfig:
    """The size of the KV cache and of what lies in it."""

    block_size: int = field(default=16, metadata=about("tokens of a KV block"))
    num_blocks: int | None = field(
        default=None, metadata=about("KV blocks to share; by default a quarter of the free memory, at most 2 GiB")
    )
    max_model_len: int | None = field(
        default=None, metadata=about("most tokens of a request, prompt and output; by default the model's own limit")
    )

    enable_prefix_caching: bool = field(
        default=True, metadata=about("keep full KV blocks for requests that begin alike")
    )

    def __attrs_post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")
