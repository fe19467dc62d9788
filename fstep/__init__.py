"""fstep: the LLM inference step as pure functions over an immutable batch state."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fstep.state import BatchState, NewRequest, Plan, RequestError, SamplingParams, SchedLimits, SchedState, Schedule

if TYPE_CHECKING:
    from fstep.shell import CacheConfig, Engine, RequestOutput, Runner

__version__ = "0.1.0"
_NEED_TORCH = MappingProxyType(dict.fromkeys(("CacheConfig", "Engine", "RequestOutput", "Runner"), "fstep.shell"))


def __getattr__(name: str) -> Any:
    """What imports torch, when it is first asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)


__all__ = [
    "BatchState",
    "CacheConfig",
    "Engine",
    "NewRequest",
    "Plan",
    "RequestError",
    "RequestOutput",
    "Runner",
    "SamplingParams",
    "SchedLimits",
    "SchedState",
    "Schedule",
]
