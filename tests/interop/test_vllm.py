"""`from_vllm`: whole runs through vLLM's types, and every field that can't be taken is named."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given

from fstep import ops
from fstep.interop import InteropError, from_vllm
from fstep.state import FinishReason, SamplingParams, digest
from fstep.testing import HashModel, check_against_reference, play
from fstep.testing.strategies import scripts
from tests.interop.doubles import VllmCached, VllmNew, VllmOutput, VllmSampling, told_by_vllm
from tests.ops.conftest import Batch, new


@pytest.mark.parametrize("second_runner", [False, True])
@pytest.mark.parametrize("groups", [(0,), (0, 1)])
def test_runs_through_vllms_types_give_the_tokens_of_the_reference(start, examples, tally, groups, second_runner):
    @examples(25)
    @given(scripts(layer_groups=groups, aborts=True, adversarial=True, same_ids=True))
    def run(script):
        def through(sched, state):
            todo, sched = ops.schedule(sched, state)
            made = from_vllm(told_by_vllm(todo, state, second_runner), state)
            new = tuple(evolve(each, block_hashes=None, priority=0) for each in todo.new)
            assert digest(evolve(made, finished=())) == digest(evolve(todo, finished=(), new=new))
            assert set(made.finished) == set(todo.finished)
            return made, sched

        model = HashModel(script.plan.vocab_size, script.plan.max_model_len, groups)
        played = play(script, *start(model, script.plan), scheduler=through)
        check_against_reference(model, script.plan, played.answers)
        tally.update(played.counts)

    run()
    assert tally["preemptions"]
    assert tally["prefix_hits"]


def output_of(*new_requests, **parts):
    counts = {each.req_id: len(each.prompt_token_ids or [1]) for each in new_requests}
    return VllmOutput(
        list(new_requests), num_scheduled_tokens=counts, **parts, total_num_scheduled_tokens=sum(counts.values())
    )


def one(**fields):
    return VllmNew("r", [1, 2, 3], ([1],), **fields)


def with_sampling(**fields):
    return output_of(one(sampling_params=VllmSampling(**fields)))


def refused(output, batch):
    before = batch.state.digest()
    with pytest.raises(InteropError) as caught:
        from_vllm(output, batch.state)
    assert batch.state.digest() == before
    error = caught.value
    assert error.field in str(error)
    assert error.request_id is None or repr(error.request_id) in str(error)
    return error.request_id, error.field, error.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduled_spec_decode_tokens", {"r": [5]}),
        ("scheduled_encoder_inputs", {"r": [0]}),
        ("free_encoder_mm_hashes", ["aa"]),
        ("pending_structured_output_tokens", True),
        ("kv_connector_metadata", object()),
        ("ec_connector_metadata", object()),
    ],
)
def test_a_step_with_more_than_can_be_taken(batch, field, value):
    name, value_of_it = next(iter(value.items())) if isinstance(value, dict) else (None, value)
    assert refused(output_of(one(), **{field: value}), batch) == (name, field, value_of_it)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_features", ["image"]),
        ("pooling_params", object()),
        ("lora_request", object()),
        ("prompt_embeds", np.ones((3, 4))),
        ("prefill_token_ids", [1, 2, 3, 9]),
        ("sampling_params", None),
    ],
)
def test_a_new_request_with_more_than_can_be_taken(batch, field, value):
    request_id, named, given_value = refused(output_of(one(**{field: value})), batch)
    assert (request_id, named) == ("r", field)
    assert given_value is value or given_value == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("min_tokens", 3),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("structured_outputs", object()),
        ("extra_args", {"a": 1}),
        ("temperature", -1.0),
        ("top_p", 0.0),
    ],
)
def test_a_sampling_parameter_that_cannot_be_taken(batch, field, value):
    assert refused(with_sampling(**{field: value}), batch) == ("r", field, value)


def test_prompts_that_are_no_token_ids(batch):
    assert refused(output_of(VllmNew("r", None, ([1],))), batch) == ("r", "prompt_token_ids", None)
    assert refused(output_of(VllmNew("r", [1, -2], ([1],))), batch) == ("r", "prompt_token_ids[1]", -2)


def test_outputs_that_do_not_fit_the_state(batch):
    batch.prepare({"a": 3}, {"a": [1]}, new=(new("a", 3),))
    batch.commit([50])
    fits = {"req_ids": ["a"], "new_block_ids": [None], "num_computed_tokens": [3], "num_output_tokens": [1]}

    def cached(**changes):
        return VllmOutput([], VllmCached(**{**fits, **changes}), {"a": 1}, 1)

    assert from_vllm(cached(), batch.state).request_ids == ("a",)
    assert refused(cached(num_computed_tokens=[4]), batch) == ("a", "num_computed_tokens", 4)
    assert refused(cached(num_output_tokens=[2]), batch) == ("a", "num_output_tokens", 2)
    assert refused(cached(new_token_ids=[[7]]), batch) == ("a", "new_token_ids", [7])
    assert refused(cached(new_block_ids=[([2], [3])]), batch) == ("a", "new_block_ids", ([2], [3]))
    assert refused(cached(req_ids=["b"]), batch) == ("b", "req_ids", "b")
    assert refused(VllmOutput([], VllmCached(**fits), {"a": 1, "z": 2}, 3), batch) == ("z", "num_scheduled_tokens", 2)
    assert refused(VllmOutput([], VllmCached(**fits), {"a": 1}, 7), batch) == (None, "total_num_scheduled_tokens", 7)
    assert refused(VllmOutput(preempted_req_ids={"q"}), batch) == ("q", "preempted_req_ids", "q")
    assert refused(output_of(VllmNew("a", [10, 11, 12], ([9],))), batch) == ("a", "prefill_token_ids", None)


def test_a_resumed_request_that_nobody_called_preempted(batch):
    """Outputs of older versions have no `preempted_req_ids`; the row was still running."""
    batch.prepare({"a": 3}, {"a": [1]}, new=(new("a", 3),))
    batch.commit([50])
    again = VllmCached(["a"], {"a"}, new_block_ids=[([5],)], num_computed_tokens=[0], num_output_tokens=[1])
    todo = from_vllm(VllmOutput([], again, {"a": 4}, 4), batch.state)
    assert todo.preempted == ("a",)
    inputs = ops.prepare(batch.state, todo).step.inputs
    assert inputs.token_ids.tolist() == [10, 11, 12, 50]
    assert inputs.slot_mapping[0].tolist() == [20, 21, 22, 23]


def test_finished_requests_say_why_and_those_without_a_row_are_left_out():
    batch = Batch(eos_token_ids=(7,))
    batch.prepare({"a": 2, "b": 2}, {"a": [1], "b": [2]}, new=(new("a", 2), new("b", 2)))
    batch.commit([7, 8])
    todo = from_vllm(VllmOutput(finished_req_ids={"b", "a", "never-seen"}), batch.state)
    assert [(each.request_id, each.reason) for each in todo.finished] == [
        ("a", FinishReason.STOP),
        ("b", FinishReason.ABORT),
    ]


def test_an_id_that_ends_and_comes_again_in_one_output(batch):
    batch.prepare({"x": 3}, {"x": [1]}, new=(new("x", 3),))
    todo = from_vllm(output_of(VllmNew("x", [4, 5], ([2],)), finished_req_ids={"x"}), batch.state)
    rows = ops.prepare(batch.state, todo).rows
    assert rows.tokens[rows.request_ids.row_of["x"]].tolist() == [4, 5]


def test_requests_without_a_seed_get_different_ones_that_come_again(batch):
    names = [VllmNew(name, [1], ([block],)) for block, name in enumerate("abc", 1)]
    first, again = (from_vllm(output_of(*names), batch.state, seed=5) for _ in range(2))
    seeds = [each.sampling.seed for each in first.new]
    assert len(set(seeds)) == 3
    assert seeds == [each.sampling.seed for each in again.new]
    assert seeds != [each.sampling.seed for each in from_vllm(output_of(*names), batch.state, seed=6).new]


def test_sampling_parameters_arrive():
    batch = Batch()
    params = SamplingParams(0.5, 0.9, 7, 0.1, 11, None, ("x",), (3, 4), True)
    told = VllmSampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=11,
        max_tokens=None,
        stop=["x"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
    )
    assert from_vllm(output_of(one(sampling_params=told)), batch.state).new[0].sampling == params
