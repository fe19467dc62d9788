"""The step as pure functions. What needs torch is imported when it is first asked for."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fstep.ops._build_meta import build_meta, unpadded
from fstep.ops._commit import commit
from fstep.ops._pad import pad
from fstep.ops._prepare import prepare
from fstep.ops._schedule import schedule
from fstep.ops.forks import extend, fork
from fstep.ops.lines import adopt, revive
from fstep.ops.requests import abort, add, check_request, has_unended, has_work, reweigh

if TYPE_CHECKING:
    from fstep.ops._forward import forward
    from fstep.ops._sample import sample
    from fstep.ops._step import collect, fetch, launch, step


_NEED_TORCH = MappingProxyType(
    {
        "forward": "_forward",
        "sample": "_sample",
        "step": "_step",
        "launch": "_step",
        "collect": "_step",
        "fetch": "_step",
    }
)


def __getattr__(name: str) -> Any:
    """What needs torch, imported when it is first asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fstep.ops.{_NEED_TORCH[name]}"), name)


__all__ = [
    "abort",
    "add",
    "adopt",
    "build_meta",
    "check_request",
    "collect",
    "commit",
    "extend",
    "fetch",
    "fork",
    "forward",
    "has_unended",
    "has_work",
    "launch",
    "pad",
    "prepare",
    "revive",
    "reweigh",
    "sample",
    "schedule",
    "step",
    "unpadded",
]
