"""fstep's own step, driven by the state machine that anybody may aim at an engine of their own."""

from functools import reduce
from operator import add

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from fstep import ops
from fstep.testing import StepRunner, adversary
from fstep.testing.machine import check_runner
from fstep.testing.strategies import choices, limits, plans

SEARCHES = 16  #: one by itself has events in clumps, since each example is a variation of others
GROUPS = {"one group": (0,), "two groups": (0, 1, 0)}


def under_an_adversary(plan, limits, choices):
    return StepRunner(plan, limits, adversary(choices) if choices else ops.schedule)


@pytest.mark.parametrize("layer_groups", GROUPS.values(), ids=GROUPS)
def test_nothing_breaks_the_step(layer_groups, findings):
    """First come, first served where no choices are drawn; and no event is rare, see `fstep.testing.events`."""
    made = {"plan": plans(layer_groups, 14), "limits": limits(), "choices": st.just(b"") | choices()}
    each = round(0.3 * settings().max_examples)
    searches = [
        check_runner(under_an_adversary, configs=made, examples=each, patience=40, random_seed=number)
        for number in range(SEARCHES)
    ]
    found = reduce(add, searches)
    findings(found)
    assert found.unseen == ()
    found.check_events()
