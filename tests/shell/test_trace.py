"""Runs that are recorded, replayed and compared."""

import contextlib
import json
from itertools import count

import attrs
import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.shell import CpuDevice, Trace, TracedRunner, TraceError, diff, header_differences, new_kv, replay
from fstep.shell.runner import Runner
from fstep.shell.trace import PHASES, request_line, request_of, schedule_line
from fstep.state import (
    CacheKey,
    Env,
    FinishReason,
    Item,
    KVGroup,
    NewRequest,
    Plan,
    RequestError,
    SamplingParams,
    SchedLimits,
    Schedule,
)
from fstep.testing import CheckError, HashModel, check_replays, check_same

PLAN = Plan(32, 24, (KVGroup(10, 4, (0,)),))
LIMITS = SchedLimits(max_num_batched_tokens=9)
SEEDED = SamplingParams(temperature=1.0, max_tokens=6, seed=3)
NEW = NewRequest("a", [3, 1, 4, 1, 5], SEEDED, CacheKey("salt", "adapter", 2, (Item("hash", 1, 3),)), priority=-1)


class FailingDevice(CpuDevice):
    """Fails in `put` (before the model) or `get` (after it), as often as it is told."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "fails", [])

    def put(self, arrays):
        self._maybe("put")
        return super().put(arrays)

    def get(self, tensors):
        self._maybe("get")
        return super().get(tensors)

    def _maybe(self, verb):
        if self.fails and self.fails[0] == verb:
            raise RuntimeError(f"{self.fails.pop()} failed")


@frozen
class OffByOne(HashModel):
    """Its token ids are wrong from the `since`-th forward on."""

    since: int = 0
    calls: object = attrs.field(factory=count)

    def logits(self, params, hidden, kernels):
        made = super().logits(params, hidden, kernels)
        return made.roll(1, -1) if next(self.calls) >= self.since else made


def made(path=None, model=None, plan=PLAN, params=None):
    model, device = model or HashModel(plan.vocab_size, plan.max_model_len), FailingDevice()
    args = Env(model, params or {}, device), plan, LIMITS, new_kv(plan, model.kv_specs(), device)
    return Runner(*args) if path is None else TracedRunner(*args, path=path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def to_the_end(runner):
    while runner.has_unfinished():
        runner.step()


def a_run(path, **more):
    """Two requests, one of them preempted for want of blocks, to their end."""
    runner = made(path, **more)
    runner.add(NEW)
    runner.add(NewRequest("b", [2, 7, 1, 8, 2, 8, 1, 8], SEEDED))
    to_the_end(runner)
    return Trace.read(path)


# A run once more -----------------------------------------------------------------------------------------------------


VERBS = ("step", "add", "fork", "extend", "abort", "update_weights", "put", "get")
MOVES = st.lists(st.tuples(st.sampled_from((*VERBS, *VERBS[:2])), st.integers(0, 3)), min_size=8, max_size=30)


def move(runner, verb, number, names):
    """One call."""
    name = "abcd"[number]
    match verb:
        case "add":
            runner.add(evolve(NEW, request_id=f"{name}{next(names)}", prompt_token_ids=list(range(1, 3 + 3 * number))))
        case "abort":
            runner.abort(next((each for each in runner.state.rows.request_ids.row_of), name), FinishReason.ABORT)
        case "step":
            runner.step()
        case "fork":
            for each in list(runner.state.rows.request_ids.row_of)[:1]:
                runner.fork(each, 1 + number, [f"{each}.{next(names)}" for _ in range(1 + number)])
        case "extend":
            for each in list(runner.state.rows.request_ids.row_of)[:1]:
                runner.extend(each, np.arange(1, 2 + number, dtype=np.int32))
        case "update_weights":
            runner.update_weights({"w": torch.full((3,), float(runner.sched.weights_version + 1))})
        case fails:
            runner.env.device.fails[:] = [fails]


def test_any_run_replays_bit_for_bit(tmp_path, tally):
    @given(MOVES)
    def run(moves):
        runner, names = made(tmp_path / "run"), count()
        for verb, number in [("add", 2), *moves]:
            with contextlib.suppress(RequestError, RuntimeError):  # refused now, refused again; or planted
                move(runner, verb, number, names)
        runner.env.device.fails.clear()
        to_the_end(runner)
        check_again(runner, Trace.read(tmp_path / "run"))

    def check_again(runner, trace):
        again = made(tmp_path / "again")
        weights = {version: {"w": torch.full((3,), float(version))} for version in range(1, 40)}
        found = replay(trace, again, weights)
        assert (found.difference, found.level, found.steps) == (None, "bits", len(trace.steps))
        assert again.state.digest() == runner.state.digest()
        calls = {line["call"] for line in trace.lines}
        if "crash" not in calls:
            assert (tmp_path / "run").read_bytes() == (tmp_path / "again").read_bytes()
        tally["runs"] += 1
        tally.update(calls | {"lost_steps" for line in trace.lines if line.get("cache_ahead")})
        tally["steps"] += len(trace.steps)
        tally["preemptions"] += sum(len(line["schedule"]["preempted"]) for line in trace.steps)

    run()
    assert all(tally[name] for name in ("preemptions", "fork", "extend", "update_weights", "crash", "lost_steps"))


def test_a_trace_holds_requests_and_schedules_whole(path):
    check_same("trace", "request", request_of(json.loads(json.dumps(request_line(NEW)))), NEW)
    of_the_scheduler = {"num_computed_tokens", "block_hashes"}
    assert {each.name for each in attrs.fields(NewRequest)} - of_the_scheduler == set(request_line(NEW))
    assert {each.name for each in attrs.fields(Schedule)} == set(schedule_line(Schedule()))
    a_run(path)
    assert [line["call"] for line in Trace.read(path).lines[:3]] == ["add", "add", "step"]
    assert Trace.read(path).steps[0]["schedule"]["num_scheduled_tokens"] == [5, 4]


def test_a_run_that_comes_out_otherwise_is_found_where_it_does(path):
    trace = a_run(path)
    check_replays(path, made())
    found = replay(trace, made(model=OffByOne(32, 24, since=3)))
    assert (found.steps, found.difference.step, found.difference.phase) == (3, 3, "forward")
    assert found.difference.field == "logits"
    with pytest.raises(CheckError, match="I20: step 3, forward: logits"):
        check_replays(path, made(model=OffByOne(32, 24, since=3)))


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_phase_that_does_otherwise_is_named(path, monkeypatch, phase):
    trace = a_run(path)
    field = {"prepare": "inputs", "pad": "padding", "build_meta": "meta", "forward": "output", "sample": "sampled"}

    sound = getattr(ops, phase)

    def changed(state, *more):
        made = sound(state, *more)
        if phase == "commit":
            rows = evolve(made[0].rows, priority=made[0].rows.priority + 1)
            return evolve(made[0], rows=rows), made[1]
        state, *rest = made if phase == "forward" else (made,)
        value = getattr(state.step, field[phase])
        state = evolve(state, step=evolve(state.step, **{field[phase]: other(value)}))
        return (state, *rest) if phase == "forward" else state

    monkeypatch.setattr(ops if phase in ("sample", "commit") else ops._step, phase, changed)
    found = replay(trace, made()).difference
    assert (found.step, found.phase) == (0, phase)


def other(value):
    """The same with its first changeable array or tensor of integers, or logits, one larger."""
    if hasattr(value, "groups"):
        return evolve(value, groups=(other(value.groups[0]), *value.groups[1:]))
    name = {"Inputs": "sample_positions", "Output": "logits", "Sampled": "token_ids"}.get(type(value).__name__)
    name = name or next(each.name for each in attrs.fields(type(value)) if each.name in ("max_query_len", "positions"))
    changed = getattr(value, name) + 1
    if isinstance(changed, np.ndarray):
        changed.flags.writeable = False
    return evolve(value, **{name: changed})


def test_on_another_machine_schedules_and_tokens_count(path):
    trace = a_run(path)
    elsewhere = evolve(trace, header={**trace.header, "threads": 77})
    assert replay(elsewhere, made()).level == "tokens"
    lines = list(elsewhere.lines)
    lines[3] = json.loads(json.dumps(lines[3]).replace('"logits": "', '"logits": "other'))
    assert replay(evolve(elsewhere, lines=tuple(lines)), made()).difference is None
    assert replay(evolve(trace, lines=tuple(lines)), made()).difference.field == "logits"
    lines[3]["events"][0][1][0] += 1
    found = replay(evolve(elsewhere, lines=tuple(lines)), made()).difference
    assert (found.step, found.phase, found.field) == (1, "commit", "events of 'a'")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": evolve(PLAN, max_model_len=20)}, "plan: .* max_model_len=20"),
        ({"params": {"w": torch.ones(2)}}, "params: "),
    ],
)
def test_a_runner_that_stands_on_something_else_is_refused(path, change, message):
    with pytest.raises(TraceError, match=message):
        replay(a_run(path), made(**change))


# Crashes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fails", "phase", "ahead"), [("put", "forward", False), ("get", "fetch", True)])
def test_a_crash_leaves_its_trace_and_replays(path, fails, phase, ahead):
    runner = made(path)
    runner.add(NEW)
    runner.step()
    runner.env.device.fails[:] = [fails]
    with pytest.raises(RuntimeError):
        runner.step()
    crash = Trace.read(path).crash
    assert (crash["step"], crash["phase"], crash["error"]) == (1, phase, f"RuntimeError: {fails} failed")
    assert (crash["cache_ahead"], crash["schedule"]["request_ids"]) == (ahead, ["a"])
    check_replays(path, made())
    to_the_end(runner)
    assert Trace.read(path).crash is None
    check_replays(path, made())


def test_a_fault_of_the_schedule_is_traced_too(path, monkeypatch):
    runner = made(path)
    runner.add(NEW)

    def fails(*_):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ops._step, "schedule", named("schedule", fails))
    with pytest.raises(ZeroDivisionError):
        runner.step()
    assert Trace.read(path).crash["phase"] == "schedule"
    assert "schedule" not in Trace.read(path).crash


def named(name, function):
    """As if `function` were `fstep.ops`' own."""
    scope = {"__name__": "fstep.ops._step", "function": function}
    exec(f"def {name}(*args): return function(*args)", scope)
    return scope[name]


def test_a_file_that_cant_be_written_ends_the_trace_alone(path):
    runner = made(path)
    runner.add(NEW)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="the trace ends at step 0"):
        runner.step()
    to_the_end(runner)


# What can't be replayed ----------------------------------------------------------------------------------------------


def test_weights_are_asked_for_and_compared(path):
    runner = made(path)
    runner.add(NEW)
    runner.update_weights({"w": torch.ones(3)})
    to_the_end(runner)
    trace = Trace.read(path)
    assert replay(trace, made(), {1: {"w": torch.ones(3)}}).difference is None
    with pytest.raises(TraceError, match="weights: give the parameters of version 1"):
        replay(trace, made())
    with pytest.raises(TraceError, match="weights: version 1 has"):
        replay(trace, made(), {1: {"w": torch.zeros(3)}})


def test_a_state_set_by_hand_ends_what_can_be_replayed(path):
    runner = made(path)
    runner.add(NEW)
    runner.step()
    runner.state, runner.sched = ops.fork(runner.state, runner.sched, "a", 1)
    to_the_end(runner)
    with pytest.raises(TraceError, match="before step 1: the state was replaced by hand"):
        replay(Trace.read(path), made())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: is no trace of format 1"),
        (b"\x7fELF\n", "line 1: is no line of a trace"),
        (b"[1]\n", "line 1: is no line of a trace"),
        (b'{"a": 1}\n', "is no trace of format 1 .another file"),
        (b'{"fstep_trace": 9}\n', "is no trace of format 1 .format 9"),
        (b'{"fstep_trace": 1}\n{"step": 1}\n', "line 2: is no line of a trace"),
    ],
)
def test_a_file_that_is_no_trace_is_named(path, content, message):
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as raised:
        Trace.read(path)
    assert str(path) in str(raised.value)


def test_a_last_line_that_was_cut_off_is_left_out(path):
    whole = a_run(path)
    path.write_bytes(path.read_bytes()[:-40])
    cut = Trace.read(path)
    assert (cut.cut_off, cut.lines) == (True, whole.lines[:-1])
    check_replays(path, made())


# Two runs ------------------------------------------------------------------------------------------------------------


def test_the_same_run_twice_is_the_same(path, tmp_path):
    assert diff(a_run(path), a_run(tmp_path / "b")) is None
    assert header_differences(Trace.read(path), Trace.read(tmp_path / "b")) == {}


def test_each_field_of_a_step_is_compared(path):
    trace = a_run(path)
    places = [(phase, name) for phase in PHASES[1:] for name in trace.steps[2]["digests"][phase]]
    assert {phase for phase, _ in places} == set(PHASES[1:])
    for phase, name in places:
        line = json.loads(json.dumps(trace.steps[2]))
        line["digests"][phase][name] = "other"
        found = diff(trace, with_step(trace, 2, line))
        assert (found.step, found.phase, found.field, found.right) == (2, phase, name, "other")
    for name in trace.steps[2]["schedule"]:
        line = json.loads(json.dumps(trace.steps[2]))
        line["schedule"][name] = "other"
        found = diff(trace, with_step(trace, 2, line))
        assert (found.step, found.phase, found.field) == (2, "schedule", name)


def with_step(trace, number, line):
    lines = tuple(line if each.get("step") == number else each for each in trace.lines)
    return evolve(trace, lines=lines)


def test_a_call_that_differs_is_found_before_the_step_after_it(path, tmp_path):
    trace = a_run(path)
    runner = made(tmp_path / "b")
    runner.add(evolve(NEW, sampling=evolve(SEEDED, seed=4)))
    found = diff(trace, Trace.read(tmp_path / "b"))
    assert str(found) == "step 0, add, sampling.seed: 3 against 4"


def test_a_run_that_is_longer_differs_where_the_other_ends(path):
    trace = a_run(path)
    found = diff(trace, evolve(trace, lines=trace.lines[:-1]))
    assert (found.step, found.left, found.right) == (len(trace.steps) - 1, "step", None)


def test_long_values_are_shown_where_they_part():
    from fstep.shell.trace import against

    assert against("x" * 100 + "a", "x" * 100 + "b", 10) == "…xxxxxa' against …xxxxxb'"
    assert against(1, 2) == "1 against 2"
