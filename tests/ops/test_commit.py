"""`commit`: which drawn tokens stay, and when a request ends."""

import numpy as np
import pytest

from fstep import ops
from fstep.state import FinishReason, PhaseError, RowEvent, RowPhase, Sampled, SamplingParams, ScheduleError, i32
from tests.ops.conftest import Batch, new


def _one(params, length=3, **plan):
    batch = Batch(eos_token_ids=(2,), **plan)
    batch.prepare({"a": length}, {"a": range(1, 1 + -(-length // 4))}, new=(new("a", length, params),))
    return batch


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({}, 50, None),
        ({}, 2, FinishReason.STOP),
        ({"ignore_eos": True}, 2, None),
        ({"stop_token_ids": [50]}, 50, FinishReason.STOP),
        ({"stop_token_ids": [50], "ignore_eos": True}, 50, FinishReason.STOP),
        ({"max_tokens": 1}, 50, FinishReason.LENGTH),
        ({"max_tokens": 1}, 2, FinishReason.STOP),
    ],
)
def test_stop_rules(params, token, reason):
    batch = _one(SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}))
    assert batch.commit([token]) == (RowEvent("a", 0, (token,), reason),)
    assert batch.state.rows.output(0).tolist() == [token]
    assert RowPhase(batch.state.rows.phase[0]).finish_reason == reason


def test_the_last_token_that_the_model_allows():
    batch = _one(SamplingParams(temperature=0, max_tokens=None), length=11, max_model_len=12)
    assert batch.commit([50])[0].finish_reason is FinishReason.LENGTH


def test_several_tokens_are_taken_one_at_a_time():
    batch = _one(SamplingParams(temperature=0, max_tokens=3))
    got = Sampled(np.array([[50, 51, 52, 53]], np.int32), i32([4]), i32([0]))
    state, events = ops.commit(batch.state, got)
    assert events == (RowEvent("a", 0, (50, 51, 52), FinishReason.LENGTH),)
    got = Sampled(np.array([[50, 2, 52, 53]], np.int32), i32([4]), i32([0]))
    state, events = ops.commit(batch.state, got)
    assert events == (RowEvent("a", 0, (50, 2), FinishReason.STOP),)
    assert state.rows.output(0).tolist() == [50, 2]


def test_a_partial_prompt_gets_no_token_and_no_event(batch):
    batch.prepare({"a": 4, "b": 2}, {"a": [1], "b": [2]}, new=(new("a", 8), new("b", 2)))
    assert batch.commit([77, 50]) == (RowEvent("b", 1, (50,)),)
    rows = batch.state.rows
    assert rows.num_computed_tokens[:2].tolist() == [4, 2]
    assert rows.num_tokens[:2].tolist() == [8, 3]


def test_a_failed_row_ends_alone_with_its_name_and_position(batch):
    batch.prepare({"a": 2, "b": 2}, {"a": [1], "b": [2]}, new=(new("a", 2), new("b", 2)))
    failed, fine = batch.commit([-1, 50], error=[1, 0])
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "request 'a': the logits of position 2 hold NaN or +inf, or allow no token"
    assert fine == RowEvent("b", 1, (50,))


def test_a_second_commit_is_refused(batch):
    batch.prepare({"a": 1}, {"a": [1]}, new=(new("a", 1),))
    batch.commit([50])
    with pytest.raises(PhaseError, match=r"^commit\(\) needs what prepare\(\)"):
        batch.commit([50])


def test_tokens_of_another_batch_are_refused(batch):
    batch.prepare({"a": 1}, {"a": [1]}, new=(new("a", 1),))
    with pytest.raises(ScheduleError, match=r"got tokens of 2 requests for 1"):
        batch.commit([50, 51])
