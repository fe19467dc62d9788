"""fstep: the LLM inference step as pure functions over an immutable batch state."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fstep.state import (
    BatchState,
    CacheConfig,
    NewRequest,
    Plan,
    RequestError,
    SamplingParams,
    SchedLimits,
    SchedState,
    Schedule,
)

if TYPE_CHECKING:
    from fstep.models.demo import demo_model
    from fstep.shell import Engine, RequestOutput, Runner

__version__ = "0.1.0"
_LATER = MappingProxyType(
    {
        "demo_model": "fstep.models.demo",
        **dict.fromkeys(("Engine", "RequestOutput", "Runner"), "fstep.shell"),
    }
)


def __getattr__(name: str) -> Any:
    """What needs torch or a checkpoint, imported when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


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
    "demo_model",
]
