"""What a user may do with the values between two phases, in any order: a state machine.

Requests come and are aborted in any phase, lines of states fork, old states are revived, the model fails, a handle or
a state that is too old is tried. At each point every live row of every line holds the first tokens of what its request
gets alone; at the end all have got all of them and no block is in use.
"""

from collections import Counter
from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fstep import ops
from fstep.shell import Runner
from fstep.state import (
    BatchState,
    DonatedError,
    FinishReason,
    NewRequest,
    PhaseError,
    RequestError,
    RowPhase,
    SchedLimits,
    SchedState,
    Schedule,
    StaleStateError,
)
from fstep.testing import (
    Answer,
    HashModel,
    RollingModel,
    check_against_reference,
    check_batch,
    check_same,
    check_state,
    poison,
    reference_tokens,
    still_cached,
)
from fstep.testing.strategies import plans, prompts, sampling_params, scripts

PHASES = ("schedule", "prepare", "pad", "build_meta", "forward", "sample", "commit")
NAMES = "abcd"
MOST_LINES = 3
MOST_STEPS = 100  #: more than four requests take

lines = st.integers(0, MOST_LINES - 1)


@define(eq=False)
class Line:
    """One line of states with its scheduler and cache, and the phase that comes next."""

    state: BatchState
    sched: SchedState
    kv: Any
    requests: dict = field(factory=dict)  #: the newest of each id
    open: frozenset = frozenset()  #: ids whose end is still to come
    aborted: frozenset = frozenset()
    phase: str = "schedule"
    todo: Schedule = field(factory=Schedule)
    sched_before: Any = None  #: before the newest schedule
    used: Any = None  #: the handle before the newest
    earlier: tuple = ()  #: copies of this line between two steps

    def copy(self, **changes):
        return evolve(self, requests=dict(self.requests), **changes)


class BrokenModelError(Exception):
    """What the model raises when it is told to."""


class Fragile:
    """A model that raises when it is told to, after it has written to the cache."""

    def __init__(self, model):
        self.fails = False
        self.model, self.vocab_size, self.max_model_len = model, model.vocab_size, model.max_model_len
        self.kv_specs, self.logits = model.kv_specs, model.logits

    def hidden(self, *args):
        made = self.model.hidden(*args)
        if self.fails:
            self.fails = False
            raise BrokenModelError
        return made


class Life(RuleBasedStateMachine):
    """`start` and `counts` are set by the test below."""

    start: Any
    counts: Counter

    @initialize(kind=st.sampled_from((HashModel, RollingModel)), data=st.data())
    def begin(self, kind, data):
        self.plan = plan = data.draw(plans(max_model_len=12, recurrent=kind is RollingModel))
        self.stem = data.draw(prompts(plan.vocab_size, plan.max_model_len - 1))
        self.oracle = kind(plan.vocab_size, plan.max_model_len)
        self.model = Fragile(self.oracle)
        self.env, kv = self.start(self.model, self.plan)
        limits = SchedLimits(max_num_seqs=3, max_num_batched_tokens=6)
        state = BatchState.empty(self.plan, kv.line, kv.epoch, rows=1)
        self.lines = [Line(state, SchedState.empty(self.plan, limits), kv)]
        self.expected = {}
        self.counts["runs"] += 1
        for name in NAMES[:-1]:
            self.add(0, name, data)

    def line(self, number):
        return self.lines[number % len(self.lines)]

    def alone(self, request):
        """What a request gets alone; worked out once."""
        if id(request) not in self.expected:
            answer = reference_tokens(
                self.oracle.reference_logits,
                request.prompt_token_ids.tolist(),
                request.sampling,
                self.plan.eos_token_ids,
                self.plan.max_model_len,
            )
            self.expected[id(request)] = request, answer
        return self.expected[id(request)][1]

    @rule(number=lines, name=st.sampled_from(NAMES), data=st.data())
    def add(self, number, name, data):
        line = self.line(number)
        longest = self.plan.max_model_len - 1
        stem = self.stem[: data.draw(st.integers(0, longest))]
        prompt = (stem + data.draw(prompts(self.plan.vocab_size, longest)))[:longest]
        request = NewRequest(name, prompt, data.draw(sampling_params(self.plan.vocab_size)))
        if name in line.open or name in line.state.rows.request_ids.row_of:
            self.counts["id_in_use"] += 1
            with pytest.raises(RequestError, match=f"request '{name}': request_id='{name}': is in use"):
                ops.add(line.sched, line.state, request)
            return
        self.counts["id_again"] += name in line.requests
        line.sched = ops.add(line.sched, line.state, request)
        line.requests[name] = request
        line.open |= {name}
        line.aborted -= {name}

    @rule(number=lines, name=st.sampled_from(NAMES), phase=st.sampled_from(PHASES))
    def abort(self, number, name, phase):
        line = self.go_to(number, phase)
        waited = any(each.request_id == name for each in line.sched.waiting)
        line.sched = ops.abort(line.sched, line.state, name)
        if name in line.open:
            self.counts[f"abort_before_{line.phase}"] += 1
            line.aborted |= {name}
        if waited:
            line.open -= {name}

    @rule(number=lines, count=st.integers(1, 30))
    def go_on(self, number, count):
        line = self.line(number)
        for _ in range(count):
            getattr(self, f"_{line.phase}")(line)
            line.phase = PHASES[(PHASES.index(line.phase) + 1) % len(PHASES)]

    def _schedule(self, line):
        line.earlier = (*line.earlier[-11:], line.copy())
        line.sched_before = line.sched
        line.todo, line.sched = ops.schedule(line.sched, line.state)
        self.counts["preemptions"] += len(line.todo.preempted)

    def _prepare(self, line):
        for each in line.todo.finished:
            request, row = line.requests[each.request_id], line.state.rows.request_ids.row_of[each.request_id]
            tokens, reason = self.alone(request)
            output = tuple(line.state.rows.output(row).tolist())
            if each.reason is FinishReason.ABORT:
                assert each.request_id in line.aborted
            else:
                assert (output, each.reason) == (tokens, reason)
            line.open -= {each.request_id}
        line.state = ops.prepare(line.state, line.todo)
        if line.sched.ending == ():
            check_state(line.sched, line.state)

    def _pad(self, line):
        line.state = ops.pad(line.state)

    def _build_meta(self, line):
        line.state = ops.build_meta(line.state)
        check_batch(line.state)

    def _forward(self, line):
        poison(line.kv, line.state, cached=still_cached(line.sched_before, line.sched))
        line.used = line.kv
        line.state, line.kv = ops.forward(line.state, self.env, line.kv)

    def _sample(self, line):
        line.state = ops.sample(line.state, self.env)

    def _commit(self, line):
        line.state, events = ops.commit(line.state, ops.fetch(line.state, self.env))
        self.counts["steps"] += 1
        for event in events:
            if event.finish_reason is not None:
                row = line.state.rows.request_ids.row_of[event.request_id]
                got = tuple(line.state.rows.output(row).tolist()), event.finish_reason
                assert got == self.alone(line.requests[event.request_id])
                self.counts["finished"] += 1

    def go_to(self, number, phase):
        while self.line(number).phase != phase:
            self.go_on(number, 1)
        return self.line(number)

    @rule(number=lines)
    def the_model_fails(self, number):
        """The handle that was given stays alive, and the forward can be tried again."""
        line = self.go_to(number, "forward")
        if not line.todo.request_ids:
            return
        self.model.fails = True
        with pytest.raises(BrokenModelError):
            ops.forward(line.state, self.env, line.kv)
        assert line.kv.layers
        self.counts["failures"] += 1

    @rule(number=lines)
    def forward_is_repeated(self, number):
        line = self.go_to(number, "sample")
        line.used = line.kv
        state, line.kv = ops.forward(line.state, self.env, line.kv)
        check_same("I2", "forward()", state, line.state)
        self.counts["repeats"] += 1

    @precondition(lambda self: len(self.lines) < MOST_LINES)
    @rule(number=lines, phase=st.sampled_from(PHASES))
    def fork(self, number, phase):
        line = self.go_to(number, phase)
        kv = line.kv.clone()
        assert kv.line not in {each.kv.line for each in self.lines}
        self.lines.append(line.copy(state=ops.adopt(line.state, kv), kv=kv, used=None, earlier=()))
        self.counts["forks"] += 1
        self.counts[f"forks_before_{line.phase}"] += 1

    @rule(number=lines, back=st.integers(0, 11))
    def an_old_state_is_refused_and_revived(self, number, back):
        line = self.line(number)
        if not line.earlier:
            return
        old = line.earlier[-1 - back % len(line.earlier)]
        if old.state.kv_epoch <= line.kv.epoch - 2:
            todo, _ = ops.schedule(old.sched, old.state)
            state = ops.build_meta(ops.pad(ops.prepare(old.state, todo)))
            with pytest.raises(StaleStateError):
                ops.forward(state, self.env, line.kv)
            with pytest.raises(StaleStateError):
                ops.adopt(old.state, line.kv.clone())
            self.counts["stale"] += 1
        state, sched = ops.revive(old.state, old.sched, line.kv)
        self.lines[number % len(self.lines)] = old.copy(state=state, sched=sched, kv=line.kv, used=line.used)
        self.counts["revived"] += 1
        self.counts["revived_requests"] += len(sched.preempted)

    @rule(number=lines)
    def a_used_handle_is_refused(self, number):
        line = self.go_to(number, "forward")
        if line.used is not None:
            with pytest.raises(DonatedError):
                ops.forward(line.state, self.env, line.used)
            assert line.kv.layers
            self.counts["donated"] += 1

    @rule(number=lines)
    def a_phase_too_early_is_refused(self, number):
        line = self.line(number)
        early = {
            "schedule": lambda: ops.pad(line.state),
            "pad": lambda: ops.build_meta(line.state),
            "build_meta": lambda: ops.forward(line.state, self.env, line.kv),
            "forward": lambda: ops.sample(line.state, self.env),
            "sample": lambda: ops.fetch(line.state, self.env),
        }
        if line.phase in early:
            with pytest.raises(PhaseError):
                early[line.phase]()
            assert line.kv.layers

    @invariant()
    def every_row_holds_the_first_tokens_of_its_answer(self):
        for line in self.lines:
            rows = line.state.rows
            for row in rows.live().tolist():
                tokens, _ = self.alone(line.requests[rows.request_ids[row]])
                output = tuple(rows.output(row).tolist())
                assert output == tokens[: len(output)]
                assert (len(output) == len(tokens)) == (rows.phase[row] >= RowPhase.STOPPED)

    def teardown(self):
        for number, line in enumerate(getattr(self, "lines", ())):
            while line.phase != "schedule":
                self.go_on(number, 1)
            for _ in range(MOST_STEPS):
                if ops.has_work(line.sched, line.state):
                    self.go_on(number, len(PHASES))
            assert not ops.has_work(line.sched, line.state), (line.sched, line.state)
            assert line.open == frozenset()
            free = [pool.num_free for pool in line.sched.pools]
            assert free == [group.num_blocks - 1 for group in self.plan.groups]


def test_life(start, examples, tally):
    machine = type("LifeOnADevice", (Life,), {"start": staticmethod(start), "counts": tally})
    run_state_machine_as_test(machine, settings=examples(60, stateful_step_count=50))
    least = {"runs": 60, "steps": 400, "preemptions": 5, "failures": 8, "repeats": 25, "forks": 12, "stale": 4}
    least |= {"revived_requests": 5, "donated": 15, "id_in_use": 10, "id_again": 10, "finished": 80}
    least |= {f"abort_before_{phase}": 1 for phase in PHASES}
    assert {what: tally[what] for what in least if tally[what] < least[what]} == {}
    assert sum(tally[f"forks_before_{phase}"] for phase in PHASES[1:]) >= 5


def test_a_runner_gives_each_request_its_tokens(start, examples, tally):
    """The same from outside: requests added and aborted between steps, what comes out of each step put together."""

    @examples(30)
    @given(scripts(aborts=True, same_ids=True))
    def holds(script):
        model = HashModel(script.plan.vocab_size, script.plan.max_model_len)
        env, kv = start(model, script.plan)
        runner = Runner(env, script.plan, script.limits, kv)
        got = {}  # by id, of the newest request: its tokens and its end
        waiting = list(script.arrivals)
        for number in range(500):
            while waiting and waiting[0][0] <= number and waiting[0][1].request_id not in runner_ids(runner):
                request = waiting.pop(0)[1]
                got[request.request_id] = [request, (), None]
                runner.add(request)
                tally["requests"] += 1
            for step, name in script.aborts:
                if step == number and name in runner_ids(runner):
                    runner.abort(name)
                    got[name][2] = FinishReason.ABORT
                    tally["aborts"] += 1
            report = runner.step()
            for event in report.events:
                entry = got[event.request_id]
                entry[1] += event.token_ids
                entry[2] = event.finish_reason or entry[2]
                if event.finish_reason:
                    check_against_reference(model, script.plan, (Answer(*entry),))
                    tally["finished"] += 1
            if not waiting and not runner.has_unfinished():
                break
        assert not runner.has_unfinished()
        assert [pool.num_free for pool in runner.sched.pools] == [script.plan.groups[0].num_blocks - 1]
        check_against_reference(model, script.plan, tuple(Answer(*entry) for entry in got.values()))

    holds()
    assert tally["finished"] > 30
    assert tally["aborts"] > 5


def runner_ids(runner):
    return {*runner.state.rows.request_ids.row_of, *(each.request_id for each in runner.sched.waiting)}
