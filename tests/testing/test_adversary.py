"""The scheduler without sense: what it decides is valid, and what it decides with."""

from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.state import (
    BatchState,
    Finished,
    FinishReason,
    KVGroup,
    NewRequest,
    Plan,
    SamplingParams,
    SchedLimits,
    SchedState,
)
from fstep.testing import adversarial_schedule, adversary, check_same, check_state

PLAN = Plan(32, 16, (KVGroup(12, 4, (0,)),))
GREEDY = SamplingParams(temperature=0)


def queued(*lengths, limits=None):
    state = BatchState.empty(PLAN, rows=2)
    sched = SchedState.empty(PLAN, limits or SchedLimits())
    for name, length in zip("abcdef", lengths, strict=False):
        sched = ops.add(sched, state, NewRequest(name, [7] * length, GREEDY))
    return sched, state


def ordinary(_):
    return 0


def test_with_ordinary_choices_everybody_gets_everything():
    todo, sched = adversarial_schedule(*queued(5, 3, 9), ordinary)
    assert [each.request_id for each in todo.new] == ["a", "b", "c"]
    assert todo.num_scheduled_tokens.tolist() == [5, 3, 9]
    assert [list(todo.new_blocks[0][b]) for b in range(3)] == [[1, 2], [3], [4, 5, 6]]
    assert (sched.waiting, sched.running, sched.pools[0].num_free) == ((), ("a", "b", "c"), 5)


def test_the_number_of_sequences_and_the_blocks_are_limits():
    todo, _ = adversarial_schedule(*queued(5, 3, 9, limits=SchedLimits(max_num_seqs=2)), ordinary)
    assert todo.request_ids == ("a", "b")
    todo, sched = adversarial_schedule(*queued(15, 15, 15), ordinary)
    assert todo.num_scheduled_tokens.tolist() == [15, 15, 12]
    assert sched.pools[0].num_free == 0


def test_everybody_may_be_preempted_and_resumed_in_one_step():
    sched, state = queued(5, 3)
    todo, sched = adversarial_schedule(sched, state, ordinary)
    state = ops.prepare(state, todo)
    todo, after = adversarial_schedule(sched, state, lambda n: 5 if n == 6 else 0)
    assert todo.preempted == ("a", "b")
    assert [each.request_id for each in todo.resumed] == ["a", "b"]
    check_state(after, ops.prepare(state, todo))


def test_an_ended_request_may_be_kept_but_gets_nothing():
    sched, state = queued(5, 3)
    todo, sched = adversarial_schedule(sched, state, ordinary)
    state = ops.prepare(state, todo)
    sched = ops.abort(sched, state, "a")
    todo, after = adversarial_schedule(sched, state, lambda n: 3 if n == 4 else 0)
    assert (todo.finished, todo.request_ids) == ((), ("b",))
    todo, after = adversarial_schedule(after, state, ordinary)
    assert todo.finished == (Finished("a", FinishReason.ABORT),)
    assert after.running == ("b",)


@given(st.binary(max_size=12), st.lists(st.integers(1, 15), min_size=1, max_size=6))
def test_any_choices_make_a_valid_schedule(choices, lengths):
    sched, state = queued(*lengths)
    decide = adversary(choices + b"\0")
    todo, sched = decide(sched, state)
    check_state(sched, ops.prepare(state, todo))


def test_when_the_choices_are_used_up_it_is_first_come_first_served():
    decide = adversary(b"\x01\x02")
    decide(*queued(5, 3))
    check_same("I2", "schedule", decide(*queued(5, 3)), ops.schedule(*queued(5, 3)))
    check_same("I2", "schedule", adversary(b"")(*queued(5, 3)), ops.schedule(*queued(5, 3)))
