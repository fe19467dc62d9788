"""Everything that mutates: devices, the KV cache, the engine."""

from fstep.shell.config import CacheConfig, plan_for
from fstep.shell.cpu import CpuDevice
from fstep.shell.engine import Engine, Figures, RequestOutput
from fstep.shell.kv import KVCache, new_kv
from fstep.shell.runner import Runner, StepReport

__all__ = [
    "CacheConfig",
    "CpuDevice",
    "Engine",
    "Figures",
    "KVCache",
    "RequestOutput",
    "Runner",
    "StepReport",
    "new_kv",
    "plan_for",
]
