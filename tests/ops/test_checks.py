"""Each check finds what it is for, and says where: one fault planted in a sound batch, pool or state."""

import numpy as np
import pytest
from attrs import evolve

from fstep import ops
from fstep.ops.checks import (
    arrays_of,
    check_batch,
    check_cheaply,
    check_conservation,
    check_held,
    check_limits,
    check_logits_indices,
    check_query_start_loc,
    check_rows,
    check_rows_stay,
    check_seq_lens,
    check_slots,
    check_state,
    check_tables,
    level,
)
from fstep.state import (
    BatchArrays,
    BatchDescriptor,
    BatchState,
    CheckError,
    ConfigError,
    KVGroup,
    NewRequest,
    Plan,
    PoolView,
    Ragged,
    SamplingParams,
    SchedLimits,
    SchedState,
    Schedule,
    Tail,
    i32,
)
from fstep.testing import StepRunner

PLAN = Plan(32, 16, (KVGroup(8, 4, (0,)),), capture=(BatchDescriptor(8, 4),))


def running(counts=(5, 2), plan=PLAN, prompts=(6, 2)):
    """Requests x and y of 6 and 2 tokens, of which 5 and 2 run; `build_meta` done."""
    new = tuple(
        NewRequest(name, [7] * length, SamplingParams(temperature=0))
        for name, length in zip("xy", prompts, strict=True)
    )
    todo = Schedule(
        new=new,
        request_ids=("x", "y"),
        num_scheduled_tokens=i32(counts),
        new_blocks=(Ragged.of([(5, 2), (3,)]),),
    )
    return ops.build_meta(ops.pad(ops.prepare(BatchState.empty(plan, rows=2), todo)))


def batch(**changes):
    return evolve(arrays_of(running()), **changes)


def test_a_batch_as_plain_arrays():
    made = batch()
    assert made.row_of_token.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert made.slot_mapping[0].tolist() == [20, 21, 22, 23, 8, 12, 13, -1]
    assert made.block_tables[0].tolist() == [[5, 2], [3, 0], [0, 0], [0, 0]]
    assert (made.num_reqs, made.num_tokens) == (2, 7)


def test_a_sound_batch_passes():
    check_batch(running())
    check_batch(running(plan=evolve(PLAN, tail=Tail.CONTINUE)))
    check_batch(running(plan=evolve(PLAN, capture=())))


@pytest.mark.parametrize(
    ("check", "changes", "message"),
    [
        (
            check_slots,
            {"slot_mapping": (i32([20, 21, 22, 23, 9, 12, 13, -1]),)},
            r"I4: row 0 \(request 'x'\): slot_mapping\[0\]\[4\] is 9, expected 8",
        ),
        (
            check_slots,
            {"slot_mapping": (i32([20, 21, 22, 23, 8, 12, 13, 31]),)},
            r"I4: batch: padding of slot_mapping\[0\]\[0\] is 31, expected -1",
        ),
        (
            check_slots,
            {"block_tables": (np.array([[5, 3], [3, 0]]),), "slot_mapping": (i32([20, 21, 22, 23, 12, 12, 13, -1]),)},
            r"I4: row 0 \(request 'x'\) and row 1 \(request 'y'\): slot_mapping\[0\] is 12 for both, expected a slot",
        ),
        (
            check_slots,
            {"block_tables": (np.array([[5, 0], [3, 0]]),), "slot_mapping": (i32([20, 21, 22, 23, 0, 12, 13, -1]),)},
            r"I4: row 0 \(request 'x'\): null block in block_table\[0\]\[4\] is True, expected False",
        ),
        (
            check_query_start_loc,
            {"query_start_loc": i32([0, 5, 6, 7, 7])},
            r"I5: batch: query_start_loc\[2\] is 6, expected 7",
        ),
        (
            check_query_start_loc,
            {"query_start_loc": i32([0, 5, 7])},
            r"I5: batch: length of query_start_loc is 3, expected 5",
        ),
        (check_seq_lens, {"seq_lens": i32([5, 3, 0, 0])}, r"I6: row 1 \(request 'y'\): seq_lens\[1\] is 3, expected 2"),
        (check_seq_lens, {"seq_lens": i32([5, 2, 0, 1])}, r"I6: padded row 3: seq_lens\[3\] is 1, expected 0"),
        (
            check_seq_lens,
            {"positions": i32([0, 1, 2, 3, 4, 1, 2, 0])},
            r"I6: row 1 \(request 'y'\): positions\[5\] is 1, expected 0",
        ),
        (
            check_logits_indices,
            {"logits_indices": i32([4, 7])},
            r"I7: row 1 \(request 'y'\): logits_indices\[1\] is 7, expected 6",
        ),
        (
            check_logits_indices,
            {"discard": np.array([False, False])},
            r"I7: row 0 \(request 'x'\): discard\[0\] is False, expected True",
        ),
    ],
)
def test_a_fault_in_the_arrays_is_named(check, changes, message):
    with pytest.raises(CheckError, match=message):
        check(batch(**changes))


def test_an_error_carries_what_it_says():
    with pytest.raises(CheckError) as caught:
        check_seq_lens(batch(seq_lens=i32([5, 3, 0, 0])))
    error = caught.value
    assert (error.invariant, error.field, error.expected, error.actual) == ("I6", "seq_lens[1]", 2, 3)


def test_a_tail_that_goes_on_is_told_from_one_that_repeats():
    check_query_start_loc(batch(query_start_loc=i32([0, 5, 7, 8, 8]), tail=Tail.CONTINUE))
    with pytest.raises(CheckError, match=r"query_start_loc\[3\] is 7, expected 8"):
        check_query_start_loc(batch(tail=Tail.CONTINUE))


def test_a_table_that_is_not_the_rows_own_is_named():
    state = running()
    with pytest.raises(CheckError, match=r"I4: row 1 \(request 'y'\): block_table\[0\] is \[2, 0\], expected \[3, 0\]"):
        check_tables(batch(block_tables=(np.array([[5, 2], [2, 0], [0, 0], [0, 0]]),)), state)
    with pytest.raises(CheckError, match=r"I4: padded row 2: block_table\[0\] is \[5, 0\], expected \[0, 0\]"):
        check_tables(batch(block_tables=(np.array([[5, 2], [3, 0], [5, 0], [0, 0]]),)), state)


def test_an_engine_without_any_of_our_types_is_checked_in_ten_lines():
    mine = BatchArrays(
        row_of_token=np.array([0, 0, 1]),
        positions=np.array([2, 3, 0]),
        query_start_loc=np.array([0, 2, 3]),
        seq_lens=np.array([4, 1]),
        logits_indices=np.array([1, 2]),
        slot_mapping=(np.array([6, 7, 2]),),
        block_tables=(np.array([[2, 3], [1, 0]]),),
        block_sizes=(2,),
        num_computed_tokens=np.array([2, 0]),
        discard=np.array([False, False]),
        num_known_tokens=np.array([4, 1]),
    )
    for check in (check_slots, check_query_start_loc, check_seq_lens, check_logits_indices):
        check(mine)
    with pytest.raises(CheckError, match=r"I4: row 1: slot_mapping\[0\]\[2\] is 2, expected 4"):
        check_slots(evolve(mine, block_tables=(np.array([[2, 3], [2, 0]]),)))


def test_a_slot_in_a_block_that_is_not_held_is_named():
    sound = batch()
    held = {name: i32(sound.block_tables[0][b]) for b, name in enumerate(sound.request_ids)}
    check_held(sound, (PoolView(8, i32(()), held),))
    with pytest.raises(CheckError, match=r"I4: row 1 \(request 'y'\): slot_mapping\[0\] is in blocks \["):
        check_held(sound, (PoolView(8, i32(()), {**held, "y": i32([7])}),))


@pytest.mark.parametrize(
    ("free", "held", "message"),
    [
        ([4], {"a": [1, 2], "b": [2, 3]}, "I18: request 'b': block 2 is also in: request 'a', expected in one place"),
        ([4, 3], {"a": [1, 2], "b": [3]}, "I18: free: block 3 is also in: request 'b'"),
        ([4, 4], {"a": [1, 2, 3]}, "I18: free: block 4 is also in: free"),
        ([4], {"a": [1, 2]}, r"I18: pool: blocks is lost \[3\], unknown \[\]"),
        ([4, 5], {"a": [1, 2, 3]}, r"I18: pool: blocks is lost \[\], unknown \[5\]"),
        ([4], {"a": [0, 1, 2, 3]}, "I18: request 'a': block 0 is also in: the null block"),
    ],
)
def test_a_block_that_is_lost_or_in_two_places_is_named(free, held, message):
    with pytest.raises(CheckError, match=message):
        check_conservation(PoolView(5, i32(free), {name: i32(blocks) for name, blocks in held.items()}))


def test_a_sound_pool_passes():
    check_conservation(PoolView(5, i32([4, 2]), {"a": i32([1]), "b": i32([3])}))


def shared(free=(4,), a=(1, 2), b=(1,), cached=(3,), counts=(0, 2, 1, 0, 0)):
    return PoolView(5, i32(free), {"a": i32(a), "b": i32(b)}, i32(cached), i32(counts))


def test_blocks_with_reference_counts_may_be_shared():
    check_conservation(shared())
    check_conservation(shared(counts=(9, 2, 1, 0, 0)))  # the null block's means nothing


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"counts": (0, 1, 1, 0, 0)}, "I18: pool: reference count of block 1 is 1, expected 2"),
        ({"counts": (0, 2, 1, 0, 1)}, "I18: pool: reference count of block 4 is 1, expected 0"),
        ({"a": (1, 2, 2)}, "I18: request 'a': block 2 is also in: request 'a'"),
        ({"free": (4, 1)}, "I18: request 'b': block 1 is also in: request 'a'"),
        ({"cached": (3, 4)}, "I18: free: block 4 is also in: cached"),
        ({"cached": ()}, r"I18: pool: blocks is lost \[3\], unknown \[\]"),
    ],
)
def test_a_fault_in_a_shared_pool_is_named(parts, message):
    with pytest.raises(CheckError, match=message):
        check_conservation(shared(**parts))


def test_a_scheduler_whose_pool_is_not_what_the_rows_hold():
    state = running()
    sched = SchedState.empty(PLAN, SchedLimits())
    with pytest.raises(CheckError, match="I18: free: block 2 is also in: request 'x'"):
        check_state(sched, state)


def with_column(state, **columns):
    return evolve(state, rows=evolve(state.rows, **{name: i32(values) for name, values in columns.items()}))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"num_tokens": [7, 2]}, r"row 0 \(x\): num_tokens is 7, expected 6"),
        ({"num_computed_tokens": [0, 3]}, r"row 1 \(y\): num_computed_tokens is 3, expected 2"),
        (
            {"prefill_len": [6, 1]},
            r"row 1 \(y\): prompt_len, prefill_len, num_tokens is \[2, 1, 2\], expected \[1, 2, 2\]",
        ),
        ({"phase": [2, 1], "prefill_len": [5, 2], "prompt_len": [5, 2]}, r"row 0 \(x\): prefill_len is 5, expected 6"),
        ({"phase": [2, 1]}, r"row 0 \(x\): blocks\[0\]\.length is 2, expected 0"),
        ({"phase": [1, 0]}, r"row 1 \(y\): phase is True, expected False"),
    ],
)
def test_a_row_at_odds_with_itself_is_named(columns, message):
    check_rows(running())
    with pytest.raises(CheckError, match=message):
        check_rows(with_column(running(), **columns))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (SchedLimits(max_num_batched_tokens=6), "limits: schedule: max_num_batched_tokens is 7, expected at most 6"),
        (SchedLimits(max_num_seqs=1), "limits: schedule: max_num_seqs is 2, expected at most 1"),
        (SchedLimits(long_prefill_token_threshold=4), "long_prefill_token_threshold is 5, expected at most 4"),
    ],
)
def test_a_schedule_past_its_limits_is_named(limits, message):
    sched = evolve(SchedState.empty(PLAN, limits), running=("x", "y"))
    with pytest.raises(CheckError, match=message):
        check_limits(running().step.schedule, sched)
    check_limits(running().step.schedule, evolve(sched, limits=SchedLimits(2, 7, 5)))


def test_a_row_that_changes_hands_is_named():
    state = running()
    again = ops.prepare(state, Schedule())
    check_rows_stay(state, again)
    moved = evolve(again, rows=evolve(again.rows, request_ids=type(again.rows.request_ids)(("y", "x"))))
    with pytest.raises(CheckError, match="rows: row 0: request_ids is y, expected x"):
        check_rows_stay(state, moved)
    with pytest.raises(CheckError, match=r"rows: row 1 \(y\): generation is 2, expected 1"):
        check_rows_stay(state, with_column(again, generation=[1, 2]))


@pytest.fixture
def moment():
    """The third step of three requests that begin alike."""
    runner = StepRunner(Plan(32, 16, (KVGroup(8, 4),)), SchedLimits())
    for name in "xyz":
        runner.add(NewRequest(name, [7] * 5, SamplingParams(temperature=0, ignore_eos=True)))
    for _ in range(3):
        runner.step()
    return runner.moment


def with_meta(state, **changes):
    """With other arrays in the metadata of the only KV group."""
    step = state.step
    (group,) = step.meta.groups
    return evolve(state, step=evolve(step, meta=evolve(step.meta, groups=(evolve(group, **changes),))))


def with_padding(state, **changes):
    return evolve(state, step=evolve(state.step, padding=evolve(state.step.padding, **changes)))


@pytest.mark.parametrize("name", ["full", "cheap", "off"])
def test_a_sound_step_passes_at_every_level(name, moment):
    level(name)(moment.sched, moment.prepared)


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match=r"check='some': must be one of full, cheap, off"):
        level("some")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: with_meta(state, slot_mapping=i32([10, 10, 18])), r"I4: .*slot_mapping\[0\]\[1\] is 10"),
        (lambda state: with_meta(state, slot_mapping=i32([2, 14, 18])), r"I4: .*slot_mapping\[0\]\[0\] is 2,"),
        (lambda state: with_meta(state, slot_mapping=i32([10, 14, 32])), r"I4: .*slot_mapping\[0\]\[2\] is 32"),
        (lambda state: with_padding(state, query_start_loc=i32([1, 1, 2, 3])), r"I5: .*query_start_loc\[0\] is 1"),
        (lambda state: with_padding(state, query_start_loc=i32([0, 1, 2, 4])), r"I5: .*query_start_loc\[3\] is 4"),
        (lambda state: with_padding(state, query_start_loc=i32([0, 1, 1, 3])), r"I5: .*query_start_loc\[2\] is 1"),
        (lambda state: with_padding(state, seq_lens=i32([7, 8, 7])), r"I6: .*seq_lens\[1\] is 8, expected 7"),
    ],
)
def test_a_fault_that_the_cheap_check_sees_is_named_by_the_full_one(change, message, moment):
    for name in ("cheap", "full"):
        with pytest.raises(CheckError, match=message):
            level(name)(moment.sched, change(moment.prepared))
    level("off")(moment.sched, change(moment.prepared))


def test_the_cheap_check_finds_a_block_that_was_given_and_is_free():
    runner = StepRunner(Plan(32, 16, (KVGroup(8, 4),)))
    runner.add(NewRequest("x", [7] * 5, SamplingParams(temperature=0)))
    runner.step()
    made = runner.moment
    with pytest.raises(CheckError, match=r"I18: free: block \d is also in: request 'x', expected in one place"):
        check_cheaply(made.sched_before, made.prepared)


def test_the_cheap_check_finds_more_tokens_than_a_request_has(moment):
    rows = moment.prepared.rows
    ahead = with_column(moment.prepared, num_tokens=rows.num_tokens - 1)
    with pytest.raises(CheckError, match=r"rows: row 0 \(x\): num_tokens is 6, expected 7"):
        check_cheaply(moment.sched, ahead)


def test_a_step_that_is_refused_never_reaches_the_cache():
    runner = StepRunner(Plan(32, 16, (KVGroup(8, 4),)))
    runner.add(NewRequest("x", [7] * 5, SamplingParams(temperature=0)))

    def with_one_slot_for_all(sched, state):
        check_cheaply(sched, with_meta(state, slot_mapping=i32([9] * 5)))

    with pytest.raises(CheckError, match="I4"):
        ops.launch(runner.state, runner.sched, runner.env, runner.kv, with_one_slot_for_all)
    _, _, kv = ops.launch(runner.state, runner.sched, runner.env, runner.kv, check_cheaply)
    assert kv.epoch == 1
