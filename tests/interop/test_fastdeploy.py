"""`from_fastdeploy`: whole runs through tasks, and every field that can't be taken is named."""

import pytest
from attrs import evolve
from hypothesis import given

from fstep import ops
from fstep.interop import InteropError, from_fastdeploy
from fstep.state import FinishReason, Resumed, SchedLimits
from fstep.testing import HashModel, check_against_reference, play
from fstep.testing.strategies import scripts
from tests.interop.doubles import FastDeploySampling, FastDeployTask, RequestType, told_by_fastdeploy
from tests.ops.conftest import Batch, new

PREFILL, DECODE, PREEMPTED = RequestType.PREFILL, RequestType.DECODE, RequestType.PREEMPTED


def test_runs_through_tasks_give_the_tokens_of_the_reference(start, examples, tally):
    @examples(50)
    @given(scripts(aborts=True, same_ids=True))
    def run(script):
        longest = script.limits.long_prefill_token_threshold
        script = evolve(script, limits=SchedLimits(long_prefill_token_threshold=longest))  # every decode runs

        def through(sched, state):
            todo, sched = ops.schedule(sched, state)
            tasks, aborted = told_by_fastdeploy(todo, state, script.plan)
            made = from_fastdeploy(tasks, state, aborted=aborted)
            assert sorted(made.request_ids) == sorted(todo.request_ids)
            assert set(made.finished) == set(todo.finished)
            return made, sched

        model = HashModel(script.plan.vocab_size, script.plan.max_model_len)
        played = play(script, *start(model, script.plan), scheduler=through)
        check_against_reference(model, script.plan, played.answers)
        tally.update(played.counts)

    run()
    assert tally["preemptions"]
    assert tally["partial_prompts"]
    assert tally["prefix_hits"]


def prefill(**fields):
    made = {"block_tables": [0], "prefill_end_index": 3, "prompt_token_ids": [1, 2, 3], **fields}
    return FastDeployTask("r", PREFILL, **made)


def refused(tasks, batch):
    with pytest.raises(InteropError) as caught:
        from_fastdeploy(tasks, batch.state)
    assert caught.value.field in str(caught.value)
    return caught.value.request_id, caught.value.field, caught.value.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", "{}"),
        ("pooling_params", object()),
        ("multimodal_inputs", {"images": [1]}),
        ("enable_thinking", True),
        ("output_token_ids", [9]),
    ],
)
def test_a_task_with_more_than_can_be_taken(batch, field, value):
    assert refused([prefill(**{field: value})], batch) == ("r", field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.1),
        ("min_tokens", 2),
        ("bad_words_token_ids", [[4]]),
        ("prompt_logprobs", 1),
        ("top_p", 2.0),
    ],
)
def test_a_sampling_parameter_that_cannot_be_taken(batch, field, value):
    task = prefill(sampling_params=FastDeploySampling(**{field: value}))
    assert refused([task], batch) == ("r", field, value)


def test_fastdeploys_defaults_and_block_numbers(batch):
    todo = from_fastdeploy([prefill(block_tables=[0, 4], eos_token_ids=[[2], [3]])], batch.state, seed=1)
    params = todo.new[0].sampling
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.95, 0.7, 0, None)
    assert (params.stop_token_ids, params.ignore_eos) == ((2, 3), True)
    assert params.seed is not None
    assert todo.new_blocks[0].values.tolist() == [1, 5]


def test_the_life_of_a_request_in_tasks():
    """Two chunks, a decode without a task, one with a block, preemption, and back with its output."""
    batch = Batch()

    def step(*tasks):
        todo = from_fastdeploy(tasks, batch.state)
        batch.state = ops.prepare(batch.state, todo)
        return todo, batch.state.step.inputs

    prompt = [10, 11, 12, 13, 14, 15]
    greedy = FastDeploySampling(temperature=0)
    step(FastDeployTask("r", PREFILL, [2, 6], 0, 4, prompt, [], greedy))
    batch.commit([-1])
    todo, inputs = step(FastDeployTask("r", PREFILL, [2, 6], 4, 6, prompt))
    assert inputs.slot_mapping[0].tolist() == [28, 29]
    batch.commit([50])
    todo, inputs = step()
    assert (todo.request_ids, inputs.positions.tolist()) == (("r",), [6])
    batch.commit([51])
    step()
    batch.commit([52])
    todo, inputs = step(FastDeployTask("r", DECODE, [2, 6, 1]))
    assert inputs.slot_mapping[0].tolist() == [8]
    batch.commit([53])
    todo, _ = step(FastDeployTask("r", PREEMPTED))
    assert (todo.preempted, todo.request_ids) == (("r",), ())
    batch.commit([])
    todo, inputs = step(FastDeployTask("r", PREFILL, [0, 3, 4], 0, 10, prompt, [50, 51, 52, 53]))
    assert todo.resumed == (Resumed("r"),)
    assert inputs.token_ids.tolist() == [*prompt, 50, 51, 52, 53]


def test_tasks_that_do_not_fit_the_state(batch):
    batch.prepare({"a": 3}, {"a": [2]}, new=(new("a", 3),))
    batch.commit([50])
    assert refused([FastDeployTask("q", DECODE, [1])], batch) == ("q", "task_type", "decode")
    assert refused([FastDeployTask("q", PREEMPTED)], batch) == ("q", "task_type", "preempted")
    assert refused([FastDeployTask("q", RequestType.EXTEND)], batch) == ("q", "task_type", 3)
    assert refused([FastDeployTask("a", DECODE, [0, 1])], batch) == ("a", "block_tables", [0, 1])
    wrong = FastDeployTask("a", PREFILL, [1], 3, 4, [10, 11, 12], [51])
    assert refused([wrong], batch) == ("a", "output_token_ids", [51])
    late = FastDeployTask("a", PREFILL, [1], 2, 4, [10, 11, 12], [50])
    assert refused([late], batch) == ("a", "prefill_start_index", 2)
    assert refused([FastDeployTask("a", DECODE, [1]), FastDeployTask("a", PREEMPTED)], batch)[:2] == ("a", "task_type")


def test_ended_and_aborted_requests_are_finished_first():
    batch = Batch(eos_token_ids=(7,))
    batch.prepare({"a": 2, "b": 2}, {"a": [1], "b": [2]}, new=(new("a", 2), new("b", 2)))
    batch.commit([7, 8])
    todo = from_fastdeploy([], batch.state, aborted=["b"])
    assert [each.reason for each in todo.finished] == [FinishReason.STOP, FinishReason.ABORT]
    assert todo.request_ids == ()
    assert from_fastdeploy([], batch.state).request_ids == ("b",)


def test_one_table_is_for_one_kv_group(batch):
    plan = evolve(batch.plan, groups=batch.plan.groups * 2)
    batch.state = evolve(batch.state, plan=plan)
    assert refused([], batch) == (None, "block_tables", 2)
