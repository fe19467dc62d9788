"""Everything that mutates: devices, the KV cache, the engine."""

from fstep.shell.cpu import CpuDevice
from fstep.shell.engine import Engine, Figures, RequestOutput
from fstep.shell.kv import KVCache, new_kv
from fstep.shell.runner import Runner, StepReport
from fstep.shell.saves import SavedRequest, load_request, save_request
from fstep.shell.sizing import plan_for

__all__ = [
    "CpuDevice",
    "Engine",
    "Figures",
    "KVCache",
    "RequestOutput",
    "Runner",
    "SavedRequest",
    "StepReport",
    "load_request",
    "new_kv",
    "plan_for",
    "save_request",
]
