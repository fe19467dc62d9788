"""Schedules from other engines' types, duck-typed: no other engine is imported.

Who has a scheduler already, or wants to watch one, turns what it decided into a `Schedule` and drives the step
functions with it: `prepare(state, from_vllm(output, state))`. Each function says what it can't take with one error,
`InteropError`, that names request, field and value; nothing is left out in silence.
"""

from fstep.interop._errors import InteropError
from fstep.interop._fastdeploy import from_fastdeploy
from fstep.interop._vllm import from_vllm

__all__ = ["InteropError", "from_fastdeploy", "from_vllm"]
