"""The scheduler, step by step, and what is refused on arrival."""

import numpy as np
import pytest

from fstep import ops
from fstep.ops import prefix
from fstep.state import (
    BatchState,
    CacheKey,
    ConfigError,
    FinishReason,
    Item,
    KVGroup,
    NewRequest,
    Plan,
    RequestError,
    Sampled,
    SamplingParams,
    SchedLimits,
    SchedState,
    i32,
)
from tests.ops.conftest import GREEDY, new

ONCE = SamplingParams(temperature=0, max_tokens=1)


class Run:
    """A scheduler over rows that always draw token 7."""

    def __init__(self, num_blocks, block_size=4, max_model_len=64, caching=False, **limits):
        plan = Plan(100, max_model_len, (KVGroup(num_blocks + 1, block_size),), prefix_caching=caching)
        self.state, self.sched = BatchState.empty(plan), SchedState.empty(plan, SchedLimits(**limits))

    def add(self, name, length, max_tokens=4):
        request = new(name, length, SamplingParams(temperature=0, max_tokens=max_tokens))
        self.sched = ops.add(self.sched, self.state, request)

    def step(self):
        schedule, self.sched = ops.schedule(self.sched, self.state)
        self.state = ops.prepare(self.state, schedule)
        size = len(schedule.request_ids)
        sampled = Sampled(np.full((size, 1), 7, np.int32), np.ones(size, np.int32), np.zeros(size, np.int32))
        self.state, _ = ops.commit(self.state, sampled)
        return schedule

    def counts(self):
        schedule = self.step()
        return dict(zip(schedule.request_ids, schedule.num_scheduled_tokens.tolist(), strict=True))


def test_prompts_are_cut_to_the_budget_and_to_the_threshold():
    run = Run(99, max_num_batched_tokens=8, long_prefill_token_threshold=5)
    run.add("a", 9)
    run.add("b", 9)
    assert [run.counts() for _ in range(4)] == [
        {"a": 5, "b": 3},
        {"a": 4, "b": 4},
        {"a": 1, "b": 2},
        {"a": 1, "b": 1},
    ]


def test_places_are_limited():
    run = Run(99, max_num_seqs=2)
    for name in "abc":
        run.add(name, 1, max_tokens=1)
    assert [list(run.counts()) for _ in range(3)] == [["a", "b"], ["c"], []]


def test_the_last_admitted_gives_way_and_nobody_comes_in_that_step():
    run = Run(4)
    run.add("a", 8)
    run.add("b", 4)
    run.add("c", 1)
    steps = [run.step() for _ in range(6)]
    assert [each.preempted for each in steps] == [(), ("b", "c"), (), (), (), ()]
    assert [each.request_ids for each in steps] == [
        ("a", "b", "c"),
        *[("a",)] * 3,
        *[("b", "c")] * 2,
    ]
    assert steps[4].num_scheduled_tokens.tolist() == [5, 2]


def test_the_head_of_the_queue_waits_for_room_and_is_not_overtaken():
    run = Run(8)
    run.add("a", 20, max_tokens=12)
    run.step()
    run.add("b", 16)
    run.add("c", 3, max_tokens=1)
    seen = [run.step() for _ in range(12)]
    first = next(index for index, each in enumerate(seen) if "b" in each.request_ids)
    assert all("c" not in each.request_ids for each in seen[:first])
    assert "a" in [each.request_id for each in seen[first].finished]


def test_when_all_is_done_nothing_is_held():
    run = Run(4)
    for name in "abc":
        run.add(name, 6)
    while ops.has_work(run.sched, run.state):
        run.step()
    assert run.sched.pools[0].num_free == 4
    assert run.sched.running == run.sched.preempted == run.sched.waiting == ()
    assert not run.state.rows.phase.any()


def test_abort_wherever_it_is():
    run = Run(4, max_num_seqs=1)
    run.add("runs", 4)
    run.add("waits", 4)
    run.step()
    run.sched = ops.abort(run.sched, run.state, "waits")
    assert run.sched.waiting == ()
    run.sched = ops.abort(run.sched, run.state, "runs", FinishReason.STOP)
    run.sched = ops.abort(run.sched, run.state, "runs")
    run.sched = ops.abort(run.sched, run.state, "never was")
    assert [(each.request_id, each.reason) for each in run.step().finished] == [("runs", "stop")]
    assert run.sched.pools[0].num_free == 4


def test_an_id_can_be_used_again_only_after_its_end():
    run = Run(4)
    run.add("x", 3)
    with pytest.raises(RequestError, match=r"request 'x': request_id='x': is in use"):
        run.add("x", 3)
    run.step()
    with pytest.raises(RequestError, match="is in use"):
        run.add("x", 3)
    run.sched = ops.abort(run.sched, run.state, "x")
    run.step()
    run.add("x", 3)
    assert run.counts() == {"x": 3}


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, r"prompt_token_ids=\[\]: must hold at least one token"),
        ([1, 2, 100], {}, r"prompt_token_ids\[2\]=100: must lie in the vocabulary, 0 to 99"),
        (list(range(32)), {}, r"prompt length=32: must leave room for one token within max_model_len=32"),
        ([1], {"stop_token_ids": [100]}, r"stop_token_ids=100: must lie in the vocabulary, 0 to 99"),
        ([1] * 9, {"max_tokens": None}, r"prompt length \+ max_tokens=32: needs 8 KV blocks of 4 tokens, .* 3 to give"),
        ([1] * 9, {"max_tokens": 5}, r"prompt length \+ max_tokens=14: needs 4 KV blocks"),
    ],
)
def test_what_could_never_be_served_is_refused_on_arrival(prompt, params, message):
    run = Run(3, max_model_len=32)
    request = NewRequest("bad", prompt, SamplingParams(temperature=0, **{"max_tokens": 2, **params}))
    with pytest.raises(RequestError, match=rf"^request 'bad': {message}"):
        ops.add(run.sched, run.state, request)


def test_the_longest_request_that_fits_alone_ends():
    run = Run(3, max_model_len=32)
    run.add("a", 9, max_tokens=4)  # 13 tokens, of which the last is never computed
    while ops.has_work(run.sched, run.state):
        run.step()
    assert run.sched.pools[0].num_free == 3


@pytest.mark.parametrize(
    "prompt", [[1, 2.0], [1, "2"], [True], [[1, 2]], "text", 7, None, np.array([1.0]), np.array([[1]])]
)
def test_a_prompt_that_is_no_flat_list_of_ids(prompt):
    with pytest.raises(RequestError, match=r"prompt_token_ids=.*: must be a flat list of token ids"):
        NewRequest("bad", prompt)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.uint64, np.int8])
def test_arrays_of_any_integers_are_prompts(dtype):
    assert NewRequest("good", np.array([1, 2], dtype)).prompt_token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("value", [-1, 2**31, 2**40, 2**64 - 1])
def test_an_id_past_every_vocabulary(value):
    with pytest.raises(RequestError, match=rf"prompt_token_ids\[1\]={value}: must lie in the vocabulary"):
        NewRequest("bad", [1, value])


# Policies ------------------------------------------------------------------------------------------------------------


def test_the_lowest_priority_number_comes_in_first_and_gives_way_last():
    run = Run(6, block_size=2, max_num_seqs=2, scheduling_policy="priority")
    for name, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0)):
        request = NewRequest(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=6), priority=priority)
        run.sched = ops.add(run.sched, run.state, request)
    assert run.step().request_ids == ("d", "b")
    assert [each.request_id for each in run.sched.waiting] == ["a", "c"]
    ended, preempted = [], []
    while ops.has_work(run.sched, run.state):
        step = run.step()
        ended += [each.request_id for each in step.finished]
        preempted += step.preempted
    assert ended == ["d", "b", "c", "a"]
    assert preempted == ["b", "a"]


def test_a_decode_goes_before_prompts_that_came_earlier():
    run = Run(99, max_num_batched_tokens=6, scheduling_policy="decode-first")
    run.add("long", 20)
    run.add("short", 2)
    run.step()
    run.sched = ops.abort(run.sched, run.state, "long")
    run.add("longer", 20)
    assert run.counts() == {"short": 2, "longer": 4}
    assert run.counts() == {"short": 1, "longer": 5}


def test_prompts_that_take_several_steps_are_limited_in_number():
    run = Run(99, max_num_batched_tokens=20, long_prefill_token_threshold=4, max_long_partial_prefills=1)
    for name, length in (("a", 9), ("b", 9), ("c", 3)):
        run.add(name, length)
    assert [run.counts() for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 1, "b": 4, "c": 3}, {"a": 1, "b": 4, "c": 1}]


def test_a_policy_that_there_is_not():
    with pytest.raises(ConfigError, match="scheduling_policy='lifo': must be one of fcfs, priority, decode-first"):
        SchedLimits(scheduling_policy="lifo")


# The prefix cache ----------------------------------------------------------------------------------------------------


def hits(schedule):
    return {each.request_id: each.num_computed_tokens for each in schedule.new}


def test_a_prompt_that_was_there_is_found_but_for_its_last_token():
    run = Run(20, caching=True)
    run.add("a", 9)
    run.add("b", 8)
    run.add("c", 10)
    first = run.step()
    assert hits(first) == {"a": 0, "b": 4, "c": 8}  # in the very step that computes it
    assert first.num_scheduled_tokens.tolist() == [9, 4, 2]
    assert first.new_blocks[0].counts.tolist() == [3, 2, 3]
    assert first.new_blocks[0][1][0] == first.new_blocks[0][0][0]
    assert run.sched.pools[0].num_free == 20 - 3 - 1 - 1
    run.step()
    run.add("d", 9)
    assert hits(run.step()) == {"d": 8}


def test_output_is_found_too():
    run = Run(20, caching=True)
    run.add("a", 3, max_tokens=6)
    while ops.has_work(run.sched, run.state):
        run.step()
    request = NewRequest("b", [10, 11, 12, 7, 7, 7, 7, 7, 7], GREEDY)
    run.sched = ops.add(run.sched, run.state, request)
    assert hits(run.step()) == {"b": 8}


def test_what_has_been_free_longest_is_forgotten_first():
    run = Run(6, caching=True)
    for name, first in (("a", 10), ("b", 50)):
        run.sched = ops.add(run.sched, run.state, NewRequest(name, list(range(first, first + 8)), ONCE))
        while ops.has_work(run.sched, run.state):
            run.step()
    run.sched = ops.add(run.sched, run.state, NewRequest("c", list(range(70, 82)), ONCE))
    run.step()  # the two blocks that never held anything, and the last one of a
    run.step()
    chains = [prefix.hashes_of(i32(range(first, first + 8)), 4, CacheKey()) for first in (10, 50)]
    found = [[run.sched.pools[0].find(each) is not None for each in chain] for chain in chains]
    assert found == [[True, False], [True, True]]


def test_a_resumed_request_finds_its_own_blocks():
    run = Run(6, block_size=2, caching=True)
    run.add("a", 4, max_tokens=8)
    run.add("b", 4, max_tokens=8)
    back = None
    while back is None:
        step = run.step()
        back = step.resumed[0] if step.resumed else None
    assert back.request_id == "b"
    row = run.state.rows.request_ids.row_of["b"]
    assert back.num_computed_tokens > 0
    assert back.num_computed_tokens + step.num_scheduled_tokens[-1] == run.state.rows.num_tokens[row] - 1


def test_a_shared_block_is_free_when_the_last_one_gives_it_back():
    run = Run(8, caching=True)
    run.add("a", 9, max_tokens=1)
    run.add("b", 9, max_tokens=5)
    run.step()
    run.step()
    pool = run.sched.pools[0]
    held = run.state.rows.blocks[0][run.state.rows.request_ids.row_of["b"]]
    assert pool.ref_counts_of(held).tolist() == [1, 1, 1]
    assert pool.num_free == 5
    assert len(pool.hashes) == 2


def test_new_weights_find_nothing_of_the_old_ones():
    run = Run(20, caching=True)
    run.add("a", 9, max_tokens=3)
    run.step()
    run.sched = ops.reweigh(run.sched, 1)
    run.add("b", 9)
    assert hits(run.step()) == {"b": 0}
    run.add("c", 9)
    assert hits(run.step()) == {"c": 8}
    with pytest.raises(ValueError, match="weights_version=1: must be above 1"):
        ops.reweigh(run.sched, 1)


def test_a_block_that_two_weights_filled_is_not_found():
    run = Run(20, caching=True)
    run.add("a", 3, max_tokens=9)
    run.step()
    run.sched = ops.reweigh(run.sched, 1)
    run.state, run.sched = ops.fork(run.state, run.sched, "a", 1)
    run.step()
    run.step()  # the first block of both is full by now
    assert run.sched.pools[0].hashes == {}
    assert run.sched.uncached == {"a", "a#1"}
    run.add("b", 9)
    run.step()
    while ops.has_work(run.sched, run.state):
        run.step()
    assert run.sched.uncached == frozenset()
    assert len(run.sched.pools[0].hashes) == 3


def test_a_request_that_waits_while_the_weights_change_gets_new_hashes():
    run = Run(20, caching=True, max_num_seqs=1)
    run.add("a", 9, max_tokens=1)
    run.add("b", 9, max_tokens=1)
    run.step()
    run.sched = ops.reweigh(run.sched, 1)
    assert hits(run.step()) == {"b": 0}


def test_what_a_failed_request_computed_is_not_found():
    run = Run(20, caching=True)
    run.add("a", 9)
    schedule, run.sched = ops.schedule(run.sched, run.state)
    state = ops.prepare(run.state, schedule)
    failed = Sampled(np.full((1, 1), -1, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32))
    run.state, _ = ops.commit(state, failed)
    run.add("b", 9)
    assert hits(run.step()) == {"b": 0}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CacheKey(lora_name="S"), CacheKey(salt="S")),
        (CacheKey(lora_name="S"), CacheKey(lora_name="S", lora_generation=1)),
        (CacheKey(salt="S"), CacheKey()),
        (CacheKey(items=(Item("h", 1, 2),)), CacheKey(items=(Item("g", 1, 2),))),
    ],
)
def test_other_keys_find_nothing(ours, theirs):
    run = Run(20, caching=True)
    for name, key, hit in (("a", ours, 0), ("b", theirs, 0), ("c", ours, 8), ("d", theirs, 8)):
        run.sched = ops.add(run.sched, run.state, NewRequest(name, list(range(9)), ONCE, key))
        assert hits(run.step()) == {name: hit}
        run.step()
