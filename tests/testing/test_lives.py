"""What a schedule may say of an id that ended and came again."""

import pytest

from fstep.state import CheckError, Finished, FinishReason, NewRequest, Ragged, Schedule, i32
from fstep.testing import StepReport
from fstep.testing.lives import LifePhase, after_abort, after_add, scheduled


def told(finished=(), new=()):
    return StepReport(
        (),
        Schedule(
            finished=tuple(Finished(name, FinishReason.ABORT) for name in finished),
            new=tuple(new),
            request_ids=tuple(each.request_id for each in new),
            num_scheduled_tokens=i32([1] * len(new)),
            new_blocks=(Ragged.of([[1]] * len(new)),),
        ),
    )


@pytest.fixture
def again():
    """An id whose first request ran and was aborted, and whose second one waits."""
    request = NewRequest("a", [0])
    lives = scheduled(after_add({}, request), told(new=[request]))
    return after_add(after_abort(lives, "a"), request)


def test_the_end_of_an_id_and_its_next_request_may_come_in_one_schedule(again):
    after = scheduled(again, told(finished=["a"], new=[again["a"].request]))
    assert after["a"].phase is LifePhase.RUNNING


def test_they_may_come_one_after_the_other(again):
    after = scheduled(again, told(finished=["a"]))
    assert after["a"].phase is LifePhase.WAITING
    assert scheduled(after, told(new=[after["a"].request]))["a"].phase is LifePhase.RUNNING


def test_an_id_ends_once_for_each_request(again):
    after = scheduled(again, told(finished=["a"]))
    with pytest.raises(CheckError, match="finished is waiting"):
        scheduled(after, told(finished=["a"]))


def test_a_request_that_waits_has_not_ended():
    lives = after_add({}, NewRequest("a", [0]))
    with pytest.raises(CheckError, match="finished is waiting"):
        scheduled(lives, told(finished=["a"]))
