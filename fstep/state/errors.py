"""What can go wrong, one class a kind. Every message names the thing, its value and the limit."""

from __future__ import annotations


class FstepError(Exception):
    """The root of every error that fstep raises on purpose."""


class FieldError(FstepError, ValueError):
    """A value that is refused: `field`, `value` and `limit` are what the message is made of."""

    def __init__(self, field: str, value: object, limit: str, who: str = "") -> None:
        self.field, self.value, self.limit = field, value, limit
        super().__init__(f"{who}{field}={_short(value)}: {limit}")


class ConfigError(FieldError):
    """An engine setting out of its range."""


class RequestError(FieldError):
    """A request that can't be served. It fails alone, before it takes a row or a block.

    `request_id` is None while the value belongs to no request yet (a `SamplingParams` being built).
    """

    def __init__(self, field: str, value: object, limit: str, request_id: str | None = None) -> None:
        self.request_id = request_id
        super().__init__(field, value, limit, "" if request_id is None else f"request {request_id!r}: ")

    def of(self, request_id: str) -> RequestError:
        """The same error with the request's name on it."""
        return RequestError(self.field, self.value, self.limit, request_id)


class ScheduleError(FstepError, ValueError):
    """A `Schedule` that breaks a rule: its caller's bug. The state it was meant for is unchanged."""

    def __init__(self, request_id: str | None, rule: str) -> None:
        self.request_id, self.rule = request_id, rule
        super().__init__(rule if request_id is None else f"request {request_id!r}: {rule}")


class PhaseError(FstepError, RuntimeError):
    """A phase called before the one that it needs."""

    def __init__(self, phase: str, needs: str) -> None:
        self.phase, self.needs = phase, needs
        super().__init__(f"{phase}() needs what {needs}() adds to the state: call {needs}() first")


class StaleStateError(FstepError, RuntimeError):
    """A state that is not the newest of its KV cache's line: going on with it could give a wrong token."""


class DonatedError(FstepError, RuntimeError):
    """A KV handle that was given to `forward` already; the handle that `forward` returned took its place."""


class CheckError(FstepError, AssertionError):
    """An invariant that doesn't hold: `invariant` is its name, `where` the row or request, `field` what is wrong."""

    def __init__(self, invariant: str, where: str, field: str, expected: object, actual: object) -> None:
        self.invariant, self.where, self.field = invariant, where, field
        self.expected, self.actual = expected, actual
        super().__init__(f"{invariant}: {where}: {field} is {actual}, expected {expected}")


class CheckpointError(FstepError, ValueError):
    """A checkpoint that can't be read: names the file and, where it applies, the tensor or the field."""


class DeviceError(FstepError, RuntimeError):
    """A device that lacks what is asked of it."""


def _short(value: object, width: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
