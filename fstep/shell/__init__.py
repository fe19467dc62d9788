"""Everything that mutates: devices, the KV cache, the engine."""

from fstep.shell.cpu import CpuDevice
from fstep.shell.engine import Engine, Figures, RequestOutput
from fstep.shell.kv import KVCache, new_kv
from fstep.shell.runner import Runner, StepReport
from fstep.shell.saves import SavedRequest, load_request, save_request
from fstep.shell.sizing import plan_for
from fstep.shell.trace import Difference, Trace, TraceError, diff, header_differences
from fstep.shell.traced import Replayed, TracedRunner, replay

__all__ = [
    "CpuDevice",
    "Difference",
    "Engine",
    "Figures",
    "KVCache",
    "Replayed",
    "RequestOutput",
    "Runner",
    "SavedRequest",
    "StepReport",
    "Trace",
    "TraceError",
    "TracedRunner",
    "diff",
    "header_differences",
    "load_request",
    "new_kv",
    "plan_for",
    "replay",
    "save_request",
]
