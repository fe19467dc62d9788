"""What a foreign schedule may ask for that can't be taken, and how it is said."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import attrs
import numpy as np

from fstep.state import FieldError, RequestError, SamplingParams


class InteropError(FieldError):
    """A foreign schedule that can't be taken: `request_id` (None: the whole step), `field`, `value` and `limit`."""

    def __init__(self, request_id: str | None, field: str, value: object, limit: str) -> None:
        self.request_id = request_id
        super().__init__(field, value, limit, "" if request_id is None else f"request {request_id!r}: ")


def refuse(request_id: str | None, source: Any, absent: Mapping[str, str]) -> None:
    """Raises `InteropError` for the first of the fields `absent` that says anything: its reason is the limit.

    A field that is missing, None, False, or empty says nothing. Of a field with an entry a request, the first is named.
    """
    for name, limit in absent.items():
        value = getattr(source, name, None)
        if says_nothing(value):
            continue
        if request_id is None and isinstance(value, dict):
            request_id, value = next(iter(cast(dict[str, Any], value).items()))
        raise InteropError(request_id, name, value, limit)


def says_nothing(value: Any) -> bool:
    if value is None or value is False:
        return True
    return hasattr(value, "__len__") and len(value) == 0


def refuse_unless(request_id: str, value: Any, field: str, neutral: tuple[Any, ...], limit: str) -> None:
    """Raises `InteropError` if `value` is neither one of `neutral` nor says nothing."""
    if not says_nothing(value) and value not in neutral:
        raise InteropError(request_id, field, value, limit)


def sampling_of(request_id: str, seed: int, values: Mapping[str, Any]) -> SamplingParams:
    """`SamplingParams` of some fields by name. Raises `InteropError` for a value that is refused.

    A request without a seed gets one that follows from `seed` and its id, so that no two share their noise.
    """
    known = {name: value for name, value in values.items() if value is not None}
    try:
        params = SamplingParams(**known)
    except RequestError as error:
        raise InteropError(request_id, error.field, error.value, error.limit) from None
    return params if params.seed is not None else attrs.evolve(params, seed=_seed_for(seed, request_id))


def _seed_for(seed: int, request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {request_id}".encode()).digest()[:8], "little")


def same_tokens(ours: Any, theirs: Any) -> bool:
    return bool(np.array_equal(np.asarray(ours), np.asarray(theirs)))
