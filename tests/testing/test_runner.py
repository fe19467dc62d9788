"""fstep's own step as a runner, and the hash model for engines that have none."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.shell.cpu import CpuDevice
from fstep.shell.kv import new_kv
from fstep.state import (
    BatchState,
    Env,
    KVGroup,
    NewRequest,
    Plan,
    RequestError,
    SamplingParams,
    SchedLimits,
    SchedState,
    i32,
)
from fstep.testing import CheckError, HashCache, HashModel, KnowsAnswers, StepRunner, arrays_of, checked_step
from fstep.testing.strategies import scripts

PLAN = Plan(32, 12, (KVGroup(5, 4, (0,)),), eos_token_ids=(1,))
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def run(runner, *requests):
    for request in requests:
        runner.add(request)
    got = {request.request_id: () for request in requests}
    reports = []
    while runner.has_unfinished():
        reports.append(runner.step())
        for output in reports[-1].outputs:
            got[output.request_id] += output.token_ids
    return got, reports


def test_a_step_runner_gives_what_its_reference_says():
    requests = [NewRequest("a", [7] * 6, GREEDY), NewRequest("b", [8], GREEDY)]
    runner = StepRunner(PLAN, SchedLimits(max_num_batched_tokens=4))
    assert isinstance(runner, KnowsAnswers)
    got, reports = run(runner, *requests)
    assert got == {request.request_id: runner.reference(request)[0] for request in requests}
    assert [sum(report.schedule.num_scheduled_tokens) for report in reports[:2]] == [4, 3]
    assert reports[0].batch.request_ids == ("a",)
    assert reports[0].pools[0].held["a"].tolist() == [1]
    assert sorted(reports[-1].pools[0].free.tolist()) == [1, 2, 3, 4]


def test_an_aborted_request_says_nothing_more():
    runner = StepRunner(PLAN)
    runner.add(NewRequest("a", [7], GREEDY))
    runner.step()
    runner.abort("a")
    assert runner.has_unfinished()
    assert runner.step().outputs == ()
    assert not runner.has_unfinished()


def test_a_request_that_cannot_be_served_is_refused():
    with pytest.raises(RequestError, match="prompt length"):
        StepRunner(PLAN).add(NewRequest("a", [7] * 12, GREEDY))


@pytest.mark.parametrize("layer_groups", [(0,), (0, 1, 0)])
def test_a_hash_cache_gives_the_logits_of_the_model(layer_groups):
    """Bit for bit those that the model in torch gives for the same batch."""
    device = CpuDevice()

    @given(scripts(layer_groups))
    def holds(script):
        model = HashModel(script.plan.vocab_size, script.plan.max_model_len, layer_groups)
        env, kv = Env(model, {}, device), new_kv(script.plan, model.kv_specs(), device)
        cache = HashCache(model, script.plan.groups)
        state, sched = BatchState.empty(script.plan), SchedState.empty(script.plan, script.limits)
        for request in script.requests:
            sched = ops.add(sched, state, request)
        for _ in range(6):
            moment = checked_step(state, sched, env, kv, guard=False)
            step = moment.forwarded.step
            logits = cache.forward(arrays_of(moment.prepared), step.inputs.token_ids)
            assert np.array_equal(logits, step.output.logits.numpy())
            state, sched, kv = moment.after, moment.sched, moment.kv

    holds()


def one_batch():
    runner = StepRunner(PLAN)
    runner.add(NewRequest("a", [7] * 6, GREEDY))
    return runner.step().batch


def last_token_of(batch, **changes):
    slots = (batch.slot_mapping[0][-1:],)
    one = {"row_of_token": batch.row_of_token[-1:], "positions": batch.positions[-1:], "slot_mapping": slots}
    return evolve(batch, **one, **changes)


@given(st.integers(0, 4), st.integers(0, 1))
def test_a_token_at_another_place_gives_other_logits(at, column):
    """A cell before the last, which is written anew."""
    batch = one_batch()
    cache = HashCache(HashModel(32, 12), PLAN.groups)
    wanted = cache.forward(batch, i32([7] * 6))
    assert np.array_equal(cache.forward(last_token_of(batch), i32([7])), wanted)
    cache.pages[0][batch.slot_mapping[0][at], column] += 1
    assert not np.array_equal(cache.forward(last_token_of(batch), i32([7])), wanted)


def test_a_cell_that_nobody_wrote_is_named():
    batch = one_batch()
    cache = HashCache(HashModel(32, 12), PLAN.groups)
    wanted = cache.forward(batch, i32([7] * 6))
    cache.copy(0, 1, 3)
    moved = last_token_of(batch, block_tables=(np.array([[3, 2]]),))
    assert np.array_equal(cache.forward(moved, i32([7])), wanted)
    cache.forget(0, i32([3]))
    with pytest.raises(
        CheckError, match=r"I17: row 0 \(request 'a'\): cell of position 0 in KV group 0 is not written"
    ):
        cache.forward(moved, i32([7]))
