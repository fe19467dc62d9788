"""What a request's keys and values depend on beside its token ids."""

from __future__ import annotations

from attrs import frozen


@frozen
class Item:
    """Something in a prompt that its placeholder ids don't tell: an image, a clip."""

    content_hash: str
    offset: int  #: of its first token in the prompt
    length: int  #: tokens


@frozen
class CacheKey:
    """What decides keys and values beside the token ids: requests share blocks only where all of it agrees."""

    salt: str | None = None
    lora_name: str | None = None
    lora_generation: int = 0  #: counts how often an adapter of this name was loaded
    items: tuple[Item, ...] = ()
