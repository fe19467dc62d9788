"""How a request's tokens are chosen: the parameters as a user gives them, and as columns over the rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, cast

import attrs
import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from fstep.state.arrays import F32, I32, U64, frozen_array
from fstep.state.errors import RequestError
from fstep.state.plan import about

GREEDY_BELOW = 1e-5  #: a temperature under this is greedy, as in vLLM
MAX_SEED = 2**64 - 1


def _number(name: str, value: object, limit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(float(value)):
        raise RequestError(name, value, limit)
    return float(value)


def _integer(name: str, value: object, limit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(name, value, limit)
    return int(value)


def _temperature(value: object) -> float:
    limit = "must be a finite number of at least 0"
    number = _number("temperature", value, limit)
    if not 0 <= number < math.inf:
        raise RequestError("temperature", value, limit)
    return number


def _top_p(value: object) -> float:
    limit = "must lie in (0, 1]"
    number = _number("top_p", value, limit)
    if not 0 < number <= 1:
        raise RequestError("top_p", value, limit)
    return number


def _min_p(value: object) -> float:
    limit = "must lie in [0, 1]"
    number = _number("min_p", value, limit)
    if not 0 <= number <= 1:
        raise RequestError("min_p", value, limit)
    return number


def _top_k(value: object) -> int:
    limit = "must be an integer of at least 1, or 0 or -1 for all"
    number = _integer("top_k", value, limit)
    if number < -1:
        raise RequestError("top_k", value, limit)
    return max(number, 0)


def _seed(value: object) -> int | None:
    if value is None:
        return None
    limit = "must be an integer from 0 to 2**64 - 1"
    number = _integer("seed", value, limit)
    if not 0 <= number <= MAX_SEED:
        raise RequestError("seed", value, limit)
    return number


def _max_tokens(value: object) -> int | None:
    if value is None:
        return None
    limit = "must be an integer of at least 1, or None for as many as the model allows"
    number = _integer("max_tokens", value, limit)
    if number < 1:
        raise RequestError("max_tokens", value, limit)
    return number


def _stop(value: object) -> tuple[str, ...]:
    texts: Iterable[object] = (value,) if isinstance(value, str) else _several("stop", value, "strings")
    stop = tuple(texts)
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError("stop", text, "must be a string that is not empty, or a list of them")
    return tuple(str(text) for text in stop)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    limit = "must be token ids, integers of at least 0"
    ids = tuple(_integer("stop_token_ids", each, limit) for each in _several("stop_token_ids", value, "token ids"))
    for token_id in ids:
        if token_id < 0:
            raise RequestError("stop_token_ids", token_id, limit)
    return ids


def _several(name: str, value: object, what: str) -> Iterable[object]:
    if value is None:
        return ()
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
        return cast(Iterable[object], value)
    raise RequestError(name, value, f"must be a list of {what}")


def _ignore_eos(value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError("ignore_eos", value, "must be true or false")
    return value


@frozen
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. The names are those of vLLM's `SamplingParams`.

    Raises `RequestError` naming the field, its value and the limit.
    """

    temperature: float = field(
        default=1.0, converter=_temperature, metadata=about("0 is greedy; higher is more random")
    )
    top_p: float = field(
        default=1.0, converter=_top_p, metadata=about("keep the most probable tokens that together reach this")
    )
    top_k: int = field(default=0, converter=_top_k, metadata=about("keep this many most probable tokens; 0 is all"))
    min_p: float = field(
        default=0.0, converter=_min_p, metadata=about("drop tokens less probable than this share of the best one")
    )
    seed: int | None = field(
        default=None, converter=_seed, metadata=about("key of the request's noise; one is chosen if none is given")
    )
    max_tokens: int | None = field(default=16, converter=_max_tokens, metadata=about("most tokens to generate"))
    stop: tuple[str, ...] = field(
        default=(), converter=_stop, metadata=about("end before this text; may be given several times")
    )
    stop_token_ids: tuple[int, ...] = field(
        default=(), converter=_stop_token_ids, metadata=about("end with this token; may be given several times")
    )
    ignore_eos: bool = field(
        default=False, converter=_ignore_eos, metadata=about("go on after the model's own end token")
    )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@frozen(eq=False)
class SamplingRows:
    """The parameters of all rows as columns; a free row's values mean nothing."""

    temperature: F32  #: [R], 0 is greedy
    top_k: I32  #: [R], 0 is all
    top_p: F32  #: [R]
    min_p: F32  #: [R]
    seed: U64  #: [R]
    sample_index: I32  #: [R], another noise for each sample of one prompt
    max_tokens: I32  #: [R], output tokens
    stop_token_ids: I32  #: [R, S], -1 where a row has fewer; with the model's EOS ids unless they are ignored

    @classmethod
    def empty(cls, rows: int) -> SamplingRows:
        def column(dtype: Any) -> NDArray[Any]:
            return frozen_array(np.zeros(rows, dtype))

        stop = frozen_array(np.full((rows, 1), -1, np.int32))
        floats, ints = column(np.float32), column(np.int32)
        return cls(floats, ints, floats, floats, column(np.uint64), ints, ints, stop)

    def grown(self, rows: int) -> SamplingRows:
        """Columns of `rows` rows."""
        return SamplingRows(*(frozen_array(grown(column, rows)) for column in self.columns()))

    def columns(self) -> tuple[NDArray[Any], ...]:
        return tuple(getattr(self, each.name) for each in attrs.fields(SamplingRows))


def grown(column: NDArray[Any], rows: int) -> NDArray[Any]:
    """A copy with `rows` rows, the new ones zero."""
    more = np.zeros((rows - len(column), *column.shape[1:]), column.dtype)
    return np.concatenate((column, more))
