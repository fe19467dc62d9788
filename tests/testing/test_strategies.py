"""What the strategies draw can be served, and is as adversarial as it is meant to be."""

from hypothesis import given

from fstep import ops
from fstep.testing.strategies import captures, scripts


@given(scripts((0, 1, 0), aborts=True, adversarial=True))
def test_every_request_of_a_script_can_be_served(script):
    for request in script.requests:
        ops.check_request(script.plan, request)
        assert request.sampling.seed is not None
    assert [step for step, _ in script.arrivals] == sorted(step for step, _ in script.arrivals)
    assert len({request.request_id for request in script.requests}) == len(script.requests)
    assert {name for _, name in script.aborts} <= {request.request_id for request in script.requests}


@given(scripts((0, 1, 0)))
def test_each_layer_lies_in_its_group_and_each_pool_holds_the_longest_request(script):
    assert [group.layers for group in script.plan.groups] == [(0, 2), (1,)]
    for group in script.plan.groups:
        assert group.num_blocks - 1 >= group.blocks_for(script.plan.max_model_len)


@given(scripts(same_ids=True))
def test_ids_come_again(script):
    assert [request.request_id for request in script.requests] == list("ababa")[: len(script.requests)]


@given(captures())
def test_captured_shapes_ascend(capture):
    assert list(capture) == sorted(set(capture))


def test_scripts_are_crowded(tally):
    """Most have several requests, a pool in which not all of them fit, and a budget below a prompt and a half."""

    @given(scripts())
    def count(script):
        tally["scripts"] += 1
        tally["several"] += len(script.arrivals) > 2
        wanted = sum(min(len(each.prompt_token_ids) + 20, script.plan.max_model_len) for each in script.requests)
        group = script.plan.groups[0]
        tally["crowded"] += wanted > (group.num_blocks - 1) * group.block_size
        tally["tight"] += script.limits.max_num_batched_tokens < 1.5 * script.plan.max_model_len
        tally["padded"] += bool(script.plan.capture)

    count()
    assert min(tally[what] for what in ("several", "crowded", "tight", "padded")) > tally["scripts"] / 4
