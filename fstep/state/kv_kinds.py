"""What the layers of a KV group keep of a request, as values. What follows from each is in `fstep.ops.groups`."""

from __future__ import annotations

from typing import TypeAlias

from attrs import field, frozen

from fstep.state.errors import ConfigError


def _at_least_one(_: object, attribute: object, value: int) -> None:
    if value < 1:
        raise ConfigError(str(getattr(attribute, "name", "")), value, "must be at least 1")


@frozen
class FullAttention:
    """Every token sees all before it."""


@frozen
class SlidingWindow:
    """A token sees the last `window` tokens, itself among them. Raises `ConfigError` for a window below 1."""

    window: int = field(validator=_at_least_one)


@frozen
class ChunkedLocal:
    """A token sees those before it in its attention chunk: tokens `chunk * n` to `chunk * (n + 1) - 1`.

    As in Llama 4. Raises `ConfigError` for a chunk below 1.
    """

    chunk: int = field(validator=_at_least_one)


@frozen
class EncoderOnly:
    """Every token sees all of the request; nothing is kept from one step to the next."""


@frozen
class CrossAttention:
    """A token sees all of an encoder's output, of which at most `max_encoder_len` tokens are kept."""

    max_encoder_len: int = field(validator=_at_least_one)


@frozen
class StateSpace:
    """One state a request, which each token replaces."""


KVKind: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | EncoderOnly | CrossAttention | StateSpace
