"""Recording a run, and the same run once more (I20).

Given the model, the calls decide everything, so `replay` makes them again and compares what each step gives: bit for
bit on the same kind of machine and number of threads, by schedules and tokens elsewhere.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import attrs
import numpy as np
import torch
from attrs import frozen

from fstep import __version__, ops
from fstep.shell.runner import Runner, StepReport
from fstep.shell.trace import (
    FORMAT,
    PHASES,
    Difference,
    Line,
    Trace,
    TraceError,
    against,
    difference,
    level_of,
    request_line,
    request_of,
    schedule_line,
)
from fstep.state import KV, BatchState, Env, FinishReason, NewRequest, Plan, SchedLimits, Tree, digest

STOOD_ON = ("plan", "limits", "params")  #: of the header: must be equal, or there is nothing to replay

Progress = Callable[[int, int], None]


@frozen
class Replayed:
    """What a replay found."""

    steps: int  #: that were as the trace has them
    level: str  #: what was compared: "bits", or "tokens" if the trace comes from another kind of machine
    difference: Difference | None = None


class TracedRunner(Runner):
    """A `Runner` that writes its run to a file as it goes; `about` goes into the header.

    Each line is written when its call has ended, so a crash leaves all that came before it, and a last line with the
    phase, the error and the schedule. A file that can't be written any more ends the trace with a warning, not the run.
    """

    def __init__(
        self,
        env: Env,
        plan: Plan,
        limits: SchedLimits,
        kv: KV,
        check: str = "cheap",
        *,
        path: str | Path,
        about: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(env, plan, limits, kv, check)
        self._path: Path | None = Path(path).absolute()
        self._steps = 0
        self._path.write_text(_json({**header_of(self), **(about or {})}), encoding="utf-8")
        self._left = self._values()

    def add(self, request: NewRequest) -> NewRequest:
        self._look()
        request = super().add(request)
        self._write({"call": "add", **request_line(request)})
        return request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._look()
        super().abort(request_id, reason)
        self._write({"call": "abort", "request_id": request_id, "reason": str(reason)})

    def fork(self, request_id: str, n: int = 1, request_ids: Sequence[str] | None = None) -> None:
        self._look()
        super().fork(request_id, n, request_ids)
        names = None if request_ids is None else list(request_ids)
        self._write({"call": "fork", "request_id": request_id, "n": n, "request_ids": names})

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        self._look()
        super().extend(request_id, token_ids)
        self._write({"call": "extend", "request_id": request_id, "token_ids": [int(each) for each in token_ids]})

    def update_weights(self, params: Tree) -> int:
        self._look()
        version = super().update_weights(params)
        self._write({"call": "update_weights", "version": version, "params": params_digest(params)})
        return version

    def step(self) -> StepReport:
        self._look()
        try:
            report = super().step()
        except BaseException as error:
            self._write({"call": "crash", "step": self._steps, **_crash_line(error, self)})
            raise
        self._write({"call": "step", "step": self._steps, **step_line(report)})
        self._steps += 1
        return report

    def _look(self) -> None:
        """Notes a state that was replaced by hand since the last call, which a trace can't hold."""
        if any(a is not b for a, b in zip(self._values(), self._left, strict=True)):
            self._write({"call": "replaced"})

    def _values(self) -> tuple[object, ...]:
        return self.state, self.sched, self.kv

    def _write(self, line: Line) -> None:
        self._left = self._values()
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_json(line))
        except OSError as error:
            warnings.warn(f"{self._path}: the trace ends at step {self._steps}: {error}", stacklevel=3)
            self._path = None


def replay(
    trace: Trace, runner: Runner, weights: Mapping[int, Tree] | None = None, progress: Progress | None = None
) -> Replayed:
    """The run of a trace on a fresh runner of the same plan, limits and parameters, up to the first difference.

    `weights` are the parameters of each later version; `progress(steps, of)` is called after each step. A step that
    crashed isn't made to crash again: what it had done to the cache is done, and the run goes on. Raises `TraceError`
    if the runner can't be that of the trace, or the trace holds a call that can't be made again.
    """
    mine = header_of(runner)
    for name in STOOD_ON:
        if mine[name] != trace.header[name]:
            raise TraceError(f"{name}: the runner's against the trace's: {against(mine[name], trace.header[name])}")
    level = level_of(mine, trace.header)
    steps, of = 0, len(trace.steps)
    for line in trace.lines:
        if line["call"] != "step":
            _call(runner, line, weights or {}, steps)
        elif found := difference(line, {**line, **step_line(runner.step())}, steps, level):
            return Replayed(steps, level, found)
        else:
            steps += 1
            if progress:
                progress(steps, of)
    return Replayed(steps, level)


def _call(runner: Runner, line: Line, weights: Mapping[int, Tree], step: int) -> None:
    match line["call"]:
        case "add":
            runner.add(request_of(line))
        case "abort":
            runner.abort(line["request_id"], FinishReason(line["reason"]))
        case "fork":
            runner.fork(line["request_id"], line["n"], line["request_ids"])
        case "extend":
            runner.extend(line["request_id"], line["token_ids"])
        case "update_weights":
            runner.update_weights(_weights(line, weights))
        case "crash":
            if line["cache_ahead"]:
                _lose_step(runner)
        case "replaced":
            raise TraceError(f"before step {step}: the state was replaced by hand there, which a trace doesn't hold")
        case other:
            raise TraceError(f"before step {step}: {other!r} is no call that can be replayed")


def _lose_step(runner: Runner) -> None:
    """What a step does that raises after its forward: the cache moves on, and the state doesn't."""
    state, sched = runner.state, runner.sched
    if state.kv_epoch != runner.kv.epoch:
        state, sched = ops.revive(state, sched, runner.kv)
    _, _, runner.kv = ops.launch(state, sched, runner.env, runner.kv)


def _weights(line: Line, weights: Mapping[int, Tree]) -> Tree:
    version: int = line["version"]
    if version not in weights:
        raise TraceError(f"weights: give the parameters of version {version}, which the run was given")
    if (found := params_digest(weights[version])) != line["params"]:
        raise TraceError(f"weights: version {version} has {found}, the trace {line['params']}")
    return weights[version]


# What is written -----------------------------------------------------------------------------------------------------


def header_of(runner: Runner) -> Line:
    """What a run stands on."""
    kernels: Any = runner.env.device.kernels
    return {
        "fstep_trace": FORMAT,
        "fstep": __version__,
        "machine": platform.machine(),
        "kernels": getattr(kernels, "name", type(kernels).__name__),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "plan": repr(runner.state.plan),
        "limits": repr(runner.sched.limits),
        "params": params_digest(runner.env.params),
    }


def params_digest(params: Tree) -> str:
    """A digest of each parameter's place, shape and type, and of a few of its numbers."""
    return digest([(path, list(leaf.shape), str(leaf.dtype), _some_of(leaf)) for path, leaf in _leaves(params)])[:16]


def step_line(report: StepReport) -> Line:
    """A step as its line says it, but for its number."""
    return {
        "schedule": schedule_line(report.schedule),
        "digests": digests_of(report.made, report.state),
        "events": [[event.request_id, list(event.token_ids), event.finish_reason] for event in report.events],
    }


def digests_of(made: BatchState, after: BatchState) -> dict[str, dict[str, str]]:
    """A digest of each field that the phases of a step made, by phase; `made` holds them, `after` is the state then."""
    step = made.need_step("digests_of")
    groups: Sequence[Any] = step.meta.groups if step.meta else ()
    return {
        "prepare": dict(_digests(step.inputs)),
        "pad": dict(_digests(step.padding)),
        "build_meta": {f"groups[{n}].{name}": each for n, group in enumerate(groups) for name, each in _digests(group)},
        "forward": dict(_digests(step.output)),
        "sample": dict(_digests(step.sampled)),
        "commit": {name: found for name, found in _digests(after.rows) if name != "family"},
    }


def _digests(made: Any) -> Iterator[tuple[str, str]]:
    """A short digest of each field. Of a log only the lengths count: what it holds came in with the steps before."""
    for each in attrs.fields(cast(type[attrs.AttrsInstance], type(made))) if made is not None else ():
        value = getattr(made, each.name)
        if each.name in ("tokens", "weights"):
            value = value.length
        elif each.name == "blocks":
            value = [log.length for log in value]
        yield each.name, digest(value)[:16]


def _crash_line(error: BaseException, runner: Runner) -> Line:
    """A step that raised; the runner has the state from before it."""
    phase = _phase_of(error.__traceback__)
    known = {} if phase == "schedule" else {"schedule": schedule_line(ops.schedule(runner.sched, runner.state)[0])}
    ahead = runner.kv.epoch != runner.state.kv_epoch
    return {"phase": phase, "error": f"{type(error).__name__}: {error}", "cache_ahead": ahead, **known}


def _phase_of(trace: TracebackType | None) -> str:
    """The phase in which an error arose: the innermost function of `fstep.ops` of such a name."""
    phase = "step"
    while trace is not None:
        code = trace.tb_frame.f_code
        module: str = trace.tb_frame.f_globals.get("__name__", "")
        if code.co_name in (*PHASES, "fetch") and module.startswith("fstep.ops"):
            phase = code.co_name
        trace = trace.tb_next
    return phase


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each plain tensor of a parameter tree, and where it lies; a packed one differs between kernels."""
    if isinstance(tree, Mapping):
        for name, each in cast(Mapping[str, Any], tree).items():
            yield from _leaves(each, f"{path}.{name}")
    elif isinstance(tree, list | tuple):
        for number, each in enumerate(cast(Sequence[Any], tree)):
            yield from _leaves(each, f"{path}[{number}]")
    elif isinstance(tree, torch.Tensor):
        yield path, tree


def _some_of(leaf: Any, count: int = 64) -> Any:
    """Some numbers of a tensor, evenly spread."""
    flat = leaf.reshape(-1)
    return flat[:: max(len(flat) // count, 1)].contiguous()


def _json(line: Line) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"
