"""Faults of rows, and of state that outlives a request."""

import itertools

import numpy as np
import pytest

from fstep import ops
from fstep.state import Finished, FinishReason, NewRequest, RequestError
from tests.cases.conftest import Small
from tests.ops.conftest import GREEDY, Batch, new


def test_c002_a_recycled_row_keeps_nothing_of_its_request(small):
    """Allowed ids aren't built; the row's other parameters go the same way."""
    first = small.add("a", [1, 2], max_tokens=1)
    small.run()
    ends = small.tokens["a"]
    for others in ([], ["c"]):
        for name in others:
            small.add(name, [7], max_tokens=9)
        small.add("a", [1, 2], max_tokens=1, stop_token_ids=ends, temperature=3.0, top_k=1, seed=3)
        small.step()
        small.add("b", [1, 2], max_tokens=4)
        small.run()
        assert small.tokens["b"] == small.alone("b")
        assert small.ends["b"] == ["length"]
    assert first.sampling.stop_token_ids == ()


def test_c007_a_late_abort_does_not_reach_the_next_request_of_the_name(small):
    small.add("y", [9], max_tokens=12)
    small.add("x", [1, 2, 3], max_tokens=8)
    small.step()
    small.runner.abort("x")
    with pytest.raises(RequestError, match="'x'"):  # the first is still on its way out
        small.add("x", [4, 5, 6], max_tokens=4)
    small.runner.abort("x")
    small.step()
    small.add("x", [4, 5, 6], max_tokens=4)
    small.run()
    assert small.tokens["x"] == small.alone("x")
    assert small.ends["x"] == ["length"]
    assert len(small.tokens["x"]) == 4


@pytest.mark.parametrize("others", [["y"], ["y", "z"]])
def test_c008_one_schedule_both_ends_and_starts_an_id(others):
    batch, names = Batch(), ["x", *others]
    batch.prepare(
        dict.fromkeys(names, 3), {name: [n] for n, name in enumerate(names, 1)}, new=[new(n, 3) for n in names]
    )
    batch.commit([50 + n for n in range(len(names))])
    batch.prepare(dict.fromkeys(names, 1), {})
    batch.commit([60 + n for n in range(len(names))])
    before = [batch.state.rows.tokens[batch.state.rows.request_ids.row_of[name]].tolist() for name in others]
    again = NewRequest("x", [4, 5, 6], GREEDY)
    batch.prepare({"x": 3}, {"x": [9]}, finished=(Finished("x"),), new=(again,))
    rows = batch.state.rows
    assert sorted(name for name in rows.request_ids if name) == sorted(names)
    row = rows.request_ids.row_of["x"]
    assert rows.tokens[row].tolist() == [4, 5, 6]
    assert (rows.num_computed_tokens[row], rows.num_tokens[row], rows.blocks[0][row].tolist()) == (0, 3, [9])
    assert before == [rows.tokens[rows.request_ids.row_of[name]].tolist() for name in others]


def samples(n, stop_token_ids=()):
    """`n` samples of one prompt, whose last token is computed after the fork."""
    small = Small(limits={"max_num_batched_tokens": 2})
    small.add("s", [1, 2, 3], temperature=1, seed=7, max_tokens=8, stop_token_ids=stop_token_ids)
    small.step()
    if n > 1:
        small.fork("s", n - 1)
    small.run()
    return [small.tokens[name] for name in ["s", *(f"s#{k}" for k in range(1, n))]], small


def test_c138_samples_with_a_seed_differ_and_end_each_for_itself():
    (first,), _ = samples(1)
    stop = [first[3]]  # ends sample 0 early
    four, small = samples(4, stop)
    assert four[0] == first[: first.index(stop[0]) + 1]
    assert all(a != b for a, b in itertools.combinations(four, 2))
    assert [len(small.ends[name]) for name in ("s", "s#1", "s#2", "s#3")] == [1, 1, 1, 1]
    assert samples(2, stop)[0] == four[:2]
    assert samples(4, stop)[0] == four


@pytest.mark.parametrize("order", [*itertools.permutations("abc")], ids="".join)
def test_c025_each_request_goes_on_from_its_own_place(order):
    batch = Batch()
    batch.prepare({"a": 4, "c": 9}, {"a": [1], "c": [2, 3, 4]}, new=(new("a", 12), new("c", 9)))
    batch.commit([-1, 50])
    counts, blocks = {"a": 4, "b": 6, "c": 1}, {"a": [5], "b": [6, 7]}
    inputs = batch.prepare({name: counts[name] for name in order}, blocks, new=(new("b", 6),))
    places = {"a": [4, 5, 6, 7], "b": [0, 1, 2, 3, 4, 5], "c": [9]}
    assert inputs.positions.tolist() == [position for name in order for position in places[name]]
    rows = np.repeat(inputs.rows, inputs.num_scheduled_tokens)
    assert inputs.token_ids.tolist() == batch.state.rows.tokens.gather(rows, inputs.positions).tolist()


@pytest.mark.parametrize(("length", "max_tokens", "got"), [(11, 7, 1), (5, 100, 7)])
def test_c034_a_prompt_as_long_as_the_model_allows(length, max_tokens, got):
    small = Small(num_blocks=3, max_model_len=12)
    small.add("r", range(length), max_tokens=max_tokens)
    small.run()
    assert (len(small.tokens["r"]), small.ends["r"]) == (got, ["length"])
    assert small.tokens["r"] == small.alone("r")


@pytest.mark.parametrize("length", [12, 13])
def test_c034_a_longer_prompt_is_refused_with_both_numbers(length):
    with pytest.raises(RequestError, match=f"prompt length={length}.*max_model_len=12"):
        Small(max_model_len=12).add("r", range(length))


@pytest.mark.parametrize("token_id", [150000, 128, -1])
def test_c055_a_stop_id_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(RequestError, match=f"stop_token_ids={token_id}"):
        Small(vocab_size=128).add("r", [1], stop_token_ids=[token_id])


BAD = [[1, 2, 128], [1, -1], [2**40], [1, 2.0], [1, "2"], [True], [[1, 2]], np.array([[1, 2]]), np.array([1.0])]


@pytest.mark.parametrize("prompt", BAD, ids=str)
def test_c127_ids_outside_the_vocabulary_fail_alone(prompt):
    small = Small(vocab_size=128)
    small.add("good", [1, 2], max_tokens=3)
    with pytest.raises(RequestError, match="prompt_token_ids"):
        small.add("bad", prompt)
    small.run()
    assert small.tokens["good"] == small.alone("good")


def test_c127_the_message_names_position_value_and_limit():
    with pytest.raises(RequestError, match=r"prompt_token_ids\[2\]=128: must lie in the vocabulary, 0 to 127"):
        Small(vocab_size=128).add("bad", [1, 2, 128])
    for dtype in (np.int64, np.uint16):
        assert Small(vocab_size=128).add("good", np.array([1, 127], dtype)).prompt_token_ids.tolist() == [1, 127]


def test_c129_first_come_first_served_though_memory_is_idle():
    small = Small(num_blocks=8)
    small.add("a", range(18), max_tokens=12)
    small.step()
    small.add("b", range(20, 36), max_tokens=1)
    names = [f"c{number}" for number in range(20)]
    for name in names:
        small.add(name, [40, 41, 42], max_tokens=1)
        small.step()
    small.run()
    entered = [each.request_id for report in small.reports for each in report.schedule.new]
    assert entered == ["a", "b", *names]
    ended = next(n for n, report in enumerate(small.reports) if any(each.finish_reason for each in report.events))
    assert [each.request_id for each in small.reports[ended + 1].schedule.new][:1] == ["b"]


def test_c132_a_turn_that_produces_nothing():
    plain = Small()
    plain.add("r", [1, 2])
    eos = plain.run().tokens["r"][0]
    small = Small(eos_token_ids=(eos,))
    small.add("r", [1, 2])
    small.add("next", [3], max_tokens=4, ignore_eos=True)
    small.step()
    assert (small.tokens["r"], small.ends["r"]) == ([eos], ["stop"])
    small.runner.state, small.runner.sched = ops.extend(small.state, small.runner.sched, "r", [1, 2])
    small.run()
    assert len(small.ends["r"]) == 2
    assert small.tokens["next"] == small.alone("next")


def many(n, max_num_seqs):
    small = Small(limits={"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2}, num_blocks=600)
    small.add("s", [1, 2, 3], temperature=2, seed=4, max_tokens=2)
    small.step()
    small.add("other", [5], max_tokens=2)
    small.fork("s", n - 1)
    small.run()
    assert small.tokens["other"] == small.alone("other")
    return {name: tokens for name, tokens in small.tokens.items() if name != "other"}


@pytest.mark.parametrize("n", [5, 16, 40])
def test_c134_more_samples_than_places_come_in_turns(n):
    got = many(n, 4)
    assert len(got) == n
    assert all(len(tokens) == 2 for tokens in got.values())
    assert got == many(n, 200)


@pytest.mark.parametrize("n", [0, -1])
def test_c134_no_samples_are_refused(small, n):
    small.add("s", [1, 2, 3], max_tokens=2)
    small.step()
    with pytest.raises(RequestError, match=f"n={n}"):
        small.fork("s", n)


@pytest.mark.parametrize("twice", [False, True])
def test_c154_abort_while_the_last_step_is_running(small, twice):
    """The rule: what the step found wins, since its tokens exist; the abort finds an ended request."""
    small.add("r", [1, 2], max_tokens=3)
    small.step()
    small.step()
    runner = small.runner
    launched, sched, runner.kv = ops.launch(runner.state, runner.sched, runner.env, runner.kv)
    for _ in range(1 + twice):
        sched = ops.abort(sched, launched, "r")
    runner.state, events = ops.collect(launched, runner.env)
    assert [(event.request_id, event.finish_reason) for event in events] == [("r", FinishReason.LENGTH)]
    todo, runner.sched = ops.schedule(sched, runner.state)
    assert todo.finished == (Finished("r", FinishReason.LENGTH),)
    runner.state = ops.prepare(runner.state, todo).detach()
    assert not small.step().events
    small.run()
