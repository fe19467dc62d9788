"""A batch that takes its decodes first gives every request the tokens that it gets alone."""

import numpy as np
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fstep.ops.order import regions
from fstep.state import RowOrder
from fstep.testing import HashModel, check_against_reference, play
from fstep.testing.strategies import scripts


def test_i1_tokens_do_not_depend_on_the_order_of_the_batch(start, examples, tally):
    @examples(80)
    @given(scripts(adversarial=True), st.integers(1, 3))
    def holds(script, threshold):
        script = evolve(script, plan=evolve(script.plan, order=RowOrder(threshold)))
        model = HashModel(script.plan.vocab_size, script.plan.max_model_len)

        def in_order(moment):
            inputs, schedule = moment.prepared.step.inputs, moment.prepared.step.schedule
            rows = moment.prepared.rows
            assert tuple(rows.request_ids[row] for row in inputs.rows) == schedule.request_ids
            columns = inputs.num_scheduled_tokens, rows.num_computed_tokens[inputs.rows], rows.prefill_len[inputs.rows]
            assert (np.diff(regions(*columns, threshold)) >= 0).all()
            tally["reordered_steps"] += schedule.request_ids != moment.schedule.request_ids

        played = play(script, *start(model, script.plan), watch=in_order)
        tally.update(played.counts)
        check_against_reference(model, script.plan, played.answers)

    holds()
    assert tally["reordered_steps"] >= 20
