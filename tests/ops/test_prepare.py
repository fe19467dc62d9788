"""`prepare`, by hand: what the batch looks like, and what a schedule may not do."""

import numpy as np
import pytest

from fstep import ops
from fstep.state import Finished, NewRequest, Ragged, Resumed, RowPhase, ScheduleError, i32
from tests.ops.conftest import GREEDY, Batch, new


def test_a_chunk_a_fresh_prompt_and_a_decode_side_by_side(batch):
    batch.prepare({"a": 4, "c": 9}, {"a": [1], "c": [2, 3, 4]}, new=(new("a", 12), new("c", 9)))
    batch.commit([-1, 50])
    inputs = batch.prepare({"a": 4, "b": 6, "c": 1}, {"a": [5], "b": [6, 7]}, new=(new("b", 6),))
    assert inputs.query_start_loc.tolist() == [0, 4, 10, 11]
    assert inputs.positions.tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 9]
    assert inputs.token_ids.tolist() == [14, 15, 16, 17, 10, 11, 12, 13, 14, 15, 50]
    assert inputs.slot_mapping[0].tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 17]
    assert inputs.seq_lens.tolist() == inputs.sample_positions.tolist() == [8, 6, 10]
    assert inputs.logits_indices.tolist() == [3, 9, 10]
    assert inputs.discard.tolist() == [True, False, False]
    assert inputs.rows.tolist() == [0, 2, 1]


def test_slots_follow_each_requests_own_pages():
    batch = Batch()
    lengths, tables = {"a": 5, "b": 4, "c": 9}, {"a": [5, 2], "b": [7], "c": [9, 1, 3]}
    inputs = batch.prepare(lengths, tables, new=tuple(new(name, length) for name, length in lengths.items()))
    assert inputs.slot_mapping[0].tolist() == [
        *(20, 21, 22, 23, 8),
        *(28, 29, 30, 31),
        *(36, 37, 38, 39, 4, 5, 6, 7, 12),
    ]
    batch.commit([50, 51, 52])
    assert batch.prepare(dict.fromkeys(lengths, 1), {"b": [11]}).slot_mapping[0].tolist() == [9, 44, 13]


def test_freed_rows_are_taken_lowest_first_with_a_new_generation(batch):
    batch.prepare({"a": 1, "b": 1, "c": 1}, {"a": [1], "b": [2], "c": [3]}, new=tuple(new(x, 1) for x in "abc"))
    batch.prepare({"d": 1}, {"d": [1]}, finished=(Finished("a"), Finished("b")), new=(new("d", 1),))
    assert batch.state.rows.request_ids[:3] == ("d", None, "c")
    assert batch.state.rows.generation[:3].tolist() == [2, 1, 1]


def test_one_schedule_ends_and_starts_the_same_id(batch):
    batch.prepare({"x": 3, "y": 2}, {"x": [1], "y": [2]}, new=(new("x", 3), new("y", 2)))
    batch.commit([50, 51])
    again = NewRequest("x", [4, 5, 6], GREEDY)
    batch.prepare({"x": 3, "y": 1}, {"x": [3]}, finished=(Finished("x"),), new=(again,))
    rows = batch.state.rows
    row = rows.request_ids.row_of["x"]
    assert rows.tokens[row].tolist() == [4, 5, 6]
    assert rows.num_computed_tokens[row] == 0
    assert rows.blocks[0][row].tolist() == [3]
    assert rows.output(rows.request_ids.row_of["y"]).tolist() == [51]


def test_a_resumed_request_prefills_its_output_too(batch):
    batch.prepare({"a": 3}, {"a": [1]}, new=(new("a", 3),))
    batch.commit([50])
    batch.prepare({}, {}, preempted=("a",))
    rows = batch.state.rows
    assert (rows.phase[0], rows.prompt_len[0], rows.prefill_len[0]) == (RowPhase.PREEMPTED, 3, 4)
    assert rows.blocks[0].length[0] == 0
    inputs = batch.prepare({"a": 4}, {"a": [9]}, resumed=(Resumed("a"),))
    assert inputs.token_ids.tolist() == [10, 11, 12, 50]
    assert inputs.slot_mapping[0].tolist() == [36, 37, 38, 39]


def test_an_empty_step(batch):
    batch.prepare({}, {})
    state = ops.build_meta(ops.pad(batch.state))
    assert state.step.inputs.query_start_loc.tolist() == [0]
    assert state.step.meta.groups[0].block_table.shape == (0, 1)
    assert ops.commit(state, _nothing())[1] == ()


def _nothing():
    from fstep.state import Sampled

    return Sampled(np.zeros((0, 1), np.int32), i32([]), i32([]))


def _live(**more):
    return {"request_ids": ("a",), "num_scheduled_tokens": i32([1]), "new_blocks": (Ragged.of([[]]),), **more}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_ids": ("z",)}, r"'z': is named by the schedule but has no row"),
        ({"finished": (Finished("z"),)}, r"'z': is named by the schedule but has no row"),
        ({"new": (new("a", 2),)}, r"'a': can't be new"),
        ({"resumed": (Resumed("a"),)}, r"'a': can't be resumed: it is running, not preempted"),
        ({"preempted": ("a",)}, r"'a': can't be scheduled: it is preempted, not running"),
        ({"finished": (Finished("a"), Finished("a"))}, r"'a': stands twice"),
        ({"request_ids": ("a", "a"), "num_scheduled_tokens": i32([1, 1])}, r"'a': stands twice"),
        ({"num_scheduled_tokens": i32([0])}, r"'a': must be scheduled at least one token"),
        ({"num_scheduled_tokens": i32([2])}, r"'a': 4 computed \+ 2 scheduled tokens are more than the 5"),
        ({"num_scheduled_tokens": i32([1, 1])}, r"num_scheduled_tokens has 2 entries for 1"),
        ({"new_blocks": (Ragged.of([[0]]),)}, r"'a': new blocks \[0\] must lie in 1 to 31"),
        ({"new_blocks": (Ragged.of([[32]]),)}, r"'a': new blocks \[32\] must lie in 1 to 31"),
        ({"new_blocks": (Ragged.of([[3], [4]]),)}, r"new_blocks\[0\] has 2 lists for 1"),
        ({"new_blocks": ()}, r"'a': 1 blocks of 4 don't hold its 5 tokens"),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_refused_and_changes_nothing(batch, change, message):
    from fstep.state import Schedule

    batch.prepare({"a": 4}, {"a": [1]}, new=(new("a", 4),))
    batch.commit([50])
    before = batch.state.digest()
    with pytest.raises(ScheduleError, match=message):
        ops.prepare(batch.state, Schedule(**_live(**change)))
    assert batch.state.digest() == before
