"""`fork` and `extend` on small states, and what they refuse."""

import pytest

from fstep import ops
from fstep.state import FinishReason, PhaseError, RequestError, SamplingParams
from tests.ops.conftest import new
from tests.ops.test_schedule import Run


def running(length, max_tokens=9, **more):
    run = Run(**{"num_blocks": 20, "caching": True, **more})
    run.add("a", length, max_tokens)
    run.step()
    return run


def row_of(run, name):
    return run.state.rows.request_ids.row_of[name]


def fork(run, *args):
    run.state, run.sched = ops.fork(run.state, run.sched, *args)


def test_full_blocks_are_shared_and_the_partly_filled_one_is_copied():
    run = running(10)
    fork(run, "a", 2)
    blocks = run.state.rows.blocks[0]
    a, first, second = (blocks[row_of(run, name)].tolist() for name in ("a", "a#1", "a#2"))
    assert a[:2] == first[:2] == second[:2]
    assert len({a[2], first[2], second[2]}) == 3
    assert run.sched.copies[0].tolist() == [[a[2], first[2]], [a[2], second[2]]]
    assert run.sched.pools[0].ref_counts_of(a).tolist() == [3, 3, 1]
    todo = run.step()
    assert todo.copies[0].tolist() == [[a[2], first[2]], [a[2], second[2]]]
    assert todo.request_ids == ("a", "a#1", "a#2")
    assert run.step().copies == ()


def test_a_copy_of_a_copy_that_is_not_made_yet_comes_from_the_same_block():
    run = running(6)
    fork(run, "a", 1)
    fork(run, "a#1", 1)
    blocks = run.state.rows.blocks[0]
    a, copy, other = (int(blocks[row_of(run, name)][1]) for name in ("a", "a#1", "a#1#2"))
    assert run.sched.copies[0].tolist() == [[a, copy], [a, other]]


def test_nothing_is_copied_at_the_end_of_a_block():
    run = running(8)
    fork(run, "a", 1, ["copy"])
    assert run.sched.copies == ()
    assert run.sched.pools[0].num_free == 18


def test_copies_without_a_block_or_a_place_wait():
    run = running(6, max_tokens=4, num_blocks=3)
    fork(run, "a", 3)
    assert (run.sched.running, run.sched.preempted) == (("a", "a#1"), ("a#2", "a#3"))
    crowded = running(6, max_num_seqs=2)
    fork(crowded, "a", 2)
    assert (crowded.sched.running, crowded.sched.preempted) == (("a", "a#1"), ("a#2",))


def test_sample_indices_are_never_used_twice_in_a_family():
    run = running(6)
    fork(run, "a", 2)
    fork(run, "a#1", 1)
    fork(run, "a", 1, ["b"])
    rows = run.state.rows
    indices = {name: int(rows.sampling.sample_index[row]) for name, row in rows.request_ids.row_of.items()}
    assert indices == {"a": 0, "a#1": 1, "a#2": 2, "a#1#3": 3, "b": 4}
    run.add("c", 5)
    run.step()
    assert run.state.rows.num_samples[row_of(run, "c")] == 1


def test_a_fork_of_an_old_state_doesnt_touch_the_newer_one():
    run = running(6)
    before, sched = run.state, run.sched
    digest = before.digest()
    fork(run, "a", 2)
    run.step()
    assert before.digest() == digest
    again, _ = ops.fork(before, sched, "a", 2)
    other, _ = ops.fork(before, sched, "a", 2)
    assert again.digest() == other.digest()


def test_what_fork_refuses():
    run = running(6)
    run.add("waits", 3)
    for args, message in (
        (("nobody", 1), r"request 'nobody': request_id='nobody': can't fork: no request of this name has a row"),
        (("waits", 1), r"request 'waits': request_id='waits': can't fork: no request of this name has a row"),
        *((("a", n), rf"request 'a': n={n}: must be an integer of at least 1") for n in (0, -1, 1.5, True)),
        (("a", 2, ["x"]), r"request 'a': request_ids=\['x'\]: must be 2 names"),
        (("a", 2, ["x", "x"]), r"request 'a': request_ids=\['x', 'x'\]: 'x' stands there twice"),
        (("a", 1, ["a"]), r"request 'a': request_id='a': is in use"),
        (("a", 1, ["waits"]), r"request 'waits': request_id='waits': is in use"),
    ):
        with pytest.raises(RequestError, match=message):
            ops.fork(run.state, run.sched, *args)
    schedule, sched = ops.schedule(run.sched, run.state)
    with pytest.raises(PhaseError, match=r"fork\(\) needs what commit\(\) adds"):
        ops.fork(ops.prepare(run.state, schedule), sched, "a", 1)
    ending = ops.abort(run.sched, run.state, "a")
    with pytest.raises(RequestError, match="can't fork: it has ended, or is to end"):
        ops.fork(run.state, ending, "a", 1)


def test_an_extended_request_is_as_one_with_a_longer_prompt():
    run = running(5)
    run.state, run.sched = ops.extend(run.state, run.sched, "a", [50, 51, 52])
    row = row_of(run, "a")
    assert run.state.rows.tokens[row].tolist() == [10, 11, 12, 13, 14, 7, 50, 51, 52]
    assert [int(column[row]) for column in (run.state.rows.prompt_len, run.state.rows.prefill_len)] == [9, 9]
    assert run.counts() == {"a": 4}
    assert run.state.rows.output(row).tolist() == [7]


def test_a_request_that_stopped_goes_on_with_more_tokens():
    run = Run(20)
    run.sched = ops.add(run.sched, run.state, new("a", 3, SamplingParams(temperature=0, stop_token_ids=[7])))
    run.step()
    assert run.state.rows.phase[0] == 3
    run.state, run.sched = ops.extend(run.state, run.sched, "a", [1])
    schedule = run.step()
    assert schedule.finished == ()
    assert schedule.num_scheduled_tokens.tolist() == [2]
    assert [each.reason for each in run.step().finished] == [FinishReason.STOP]


def test_a_request_that_waits_gets_a_longer_prompt():
    run = Run(20, caching=True)
    run.add("a", 3)
    run.state, run.sched = ops.extend(run.state, run.sched, "a", [1, 2])
    assert run.counts() == {"a": 5}
    assert len(run.sched.pools[0].hashes) == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], r"request 'a': prompt_token_ids=\[\]: must hold at least one token"),
        ([100], r"request 'a': prompt_token_ids\[0\]=100: must lie in the vocabulary, 0 to 99"),
        ([1] * 60, r"request 'a': length=66: must leave room for one token within max_model_len=64"),
        ([1] * 30, r"request 'a': prompt length \+ max_tokens=45: needs 11 KV blocks of 4 tokens, .* 10 to give"),
    ],
)
def test_what_extend_refuses(ids, message):
    run = running(5, num_blocks=10)
    with pytest.raises(RequestError, match=message):
        ops.extend(run.state, run.sched, "a", ids)
    waiting = Run(10)
    waiting.add("a", 6, max_tokens=9)
    with pytest.raises(RequestError, match=message):
        ops.extend(waiting.state, waiting.sched, "a", ids)
