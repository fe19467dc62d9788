"""Requests on disk: what comes back, and what is refused."""

import numpy as np
import pytest
import torch
from attrs import evolve

from fstep import ops
from fstep.shell import CpuDevice, Runner, SavedRequest, load_request, new_kv, save_request
from fstep.state import (
    CacheKey,
    CheckpointError,
    Env,
    Item,
    KVGroup,
    NewRequest,
    PhaseError,
    Plan,
    RequestError,
    SamplingParams,
    SchedLimits,
    StaleStateError,
)
from fstep.testing import HashModel, reference_tokens

PLAN = Plan(32, 24, (KVGroup(20, 4, (0,)),))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=9, stop_token_ids=(31, 30), ignore_eos=True)
KEY = CacheKey("salt", "adapter", 2, (Item("hash", 1, 3),))


def runner(plan=PLAN, **limits):
    model = HashModel(plan.vocab_size, plan.max_model_len)
    device = CpuDevice()
    return Runner(Env(model, {}, device), plan, SchedLimits(**limits), new_kv(plan, model.kv_specs(), device))


@pytest.fixture
def busy():
    made = runner()
    made.add(NewRequest("a", PROMPT, PARAMS, KEY))
    for _ in range(3):
        made.step()
    return made


def save(made, name="a", **more):
    return save_request(made.state, made.sched, made.kv, name, **more)


def load(made, saved, name=None):
    made.state, made.sched, made.kv = load_request(made.state, made.sched, made.kv, saved, name)


def finish(made):
    """All tokens that come from here on, by request."""
    got = {}
    while made.has_unfinished():
        for event in made.step().events:
            got.setdefault(event.request_id, []).extend(event.token_ids)
    return got


def expected():
    logits = HashModel(32, 24).reference_logits
    return list(reference_tokens(lambda ids: logits(list(ids)), PROMPT, PARAMS, (), 24)[0])


def test_a_file_gives_back_what_was_saved(busy, tmp_path):
    saved = save(busy)
    saved.write(tmp_path / "a.npz")
    again = SavedRequest.read(str(tmp_path / "a.npz"))
    for name in ("request_id", "prompt_len", "prefill_len", "num_samples", "weights_version", "cache_key"):
        assert getattr(again, name) == getattr(saved, name)
    assert again.cache_key == KEY
    assert again.token_ids.tolist() == saved.token_ids.tolist() == PROMPT + expected()[:3]
    assert again.num_computed_tokens == 11
    for ours, theirs in zip(again.layers, saved.layers, strict=True):
        assert torch.equal(ours.k, theirs.k)
        assert torch.equal(ours.v, theirs.v)
    for ours, theirs in zip(again.sampling.columns(), saved.sampling.columns(), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_it_goes_on_where_it_was(busy):
    saved = save(busy)
    there = runner(evolve(PLAN, groups=(KVGroup(9, 5, (0,)),)))
    there.add(NewRequest("b", [1, 2], SamplingParams(temperature=0, max_tokens=3)))
    there.step()
    load(there, saved, "c")
    assert there.sched.running == ("b", "c")
    assert there.sched.uncached == {"c"}
    report = there.step()
    assert report.schedule.num_scheduled_tokens.tolist() == [1, 1]
    got = [token for event in report.events if event.request_id == "c" for token in event.token_ids]
    assert got + finish(there)["c"] == expected()[3:]
    assert finish(busy)["a"] == expected()[3:]


def test_without_keys_and_values_its_tokens_are_computed_again(busy):
    there = runner()
    load(there, save(busy, keys_and_values=False))
    assert there.sched.preempted == ("a",)
    assert finish(there)["a"] == expected()[3:]


@pytest.mark.parametrize("why", ["no place", "no block", "other weights"])
def test_without_room_it_waits_for_its_turn(busy, why):
    there = runner(evolve(PLAN, groups=(KVGroup(7, 4, (0,)),)), max_num_seqs=1 if why == "no place" else 4)
    saved = save(busy)
    if why == "other weights":
        there.update_weights({})
    else:
        length = 15 if why == "no block" else 3
        there.add(NewRequest("b", [1] * length, SamplingParams(temperature=0, max_tokens=4)))
        there.step()
    kv = there.kv
    load(there, saved)
    assert there.kv is kv
    assert there.sched.preempted == ("a",)
    assert finish(there)["a"] == expected()[3:]


def test_an_old_handle_and_an_old_state_are_refused_afterwards(busy):
    there = runner()
    before = there.state, there.sched
    load(there, save(busy))
    with pytest.raises(StaleStateError, match="load_request: the state is at epoch 0 of line 0, the KV cache at"):
        load_request(*before, there.kv, save(busy))
    with pytest.raises(StaleStateError, match="save_request: the state is at epoch"):
        save_request(*before, there.kv, "a")


def test_inside_a_step_both_are_refused(busy):
    schedule, sched = ops.schedule(busy.sched, busy.state)
    state = ops.prepare(busy.state, schedule)
    with pytest.raises(PhaseError, match=r"save_request\(\) needs what commit\(\)"):
        save_request(state, sched, busy.kv, "a")
    with pytest.raises(PhaseError, match=r"load_request\(\) needs what commit\(\)"):
        load_request(state, sched, busy.kv, save(busy), "b")


def test_a_request_that_isnt_there_cant_be_saved(busy):
    busy.add(NewRequest("waits", [1], PARAMS))
    for name in ("waits", "nobody"):
        with pytest.raises(RequestError, match=f"^request '{name}': request_id='{name}': no request of this name"):
            save(busy, name)


@pytest.mark.parametrize(
    ("plan", "name", "message"),
    [
        (PLAN, "b", r"request 'b': request_id='b': is in use"),
        (evolve(PLAN, vocab_size=8), "c", r"request 'c': prompt_token_ids\[5\]=9: must lie in the vocabulary, 0 to 7"),
        (evolve(PLAN, max_model_len=12), "c", r"request 'c': length=12: must leave room for one token within max_mod"),
        (evolve(PLAN, groups=(KVGroup(5, 4, (0,)),)), "c", r"request 'c': prompt length \+ max_tokens=18: needs 5 KV"),
    ],
)
def test_what_cant_be_served_is_refused(busy, plan, name, message):
    there = runner(plan)
    there.add(NewRequest("b", [1, 2], SamplingParams(temperature=0, max_tokens=3)))
    with pytest.raises(RequestError, match=message):
        load(there, save(busy), name)


def test_keys_and_values_of_another_model_are_refused(busy):
    saved = save(busy)
    layer = saved.layers[0]
    for layers in ((layer, layer), (evolve(layer, k=layer.k.double()),)):
        with pytest.raises(RequestError, match=r"request 'a': layers=.*must be as in this cache"):
            load(runner(), evolve(saved, layers=layers))


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "a"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a: is no request that fstep saved"):
        SavedRequest.read(path)
    np.savez(tmp_path / "b.npz", about=np.array('{"fstep_request": 9}'))
    with pytest.raises(CheckpointError, match="format 9, and this fstep reads 1"):
        SavedRequest.read(tmp_path / "b.npz")


def test_each_token_knows_the_weights_that_it_was_drawn_with(busy):
    assert busy.update_weights({}) == 1
    versions = [event.weights_version for event in busy.step().events]
    assert versions == [1]
    row = busy.state.rows.request_ids.row_of["a"]
    assert busy.state.rows.weights_versions(row).tolist() == [0, 0, 0, 1]
    there = runner()
    there.update_weights({})
    there.update_weights({})
    load(there, save(busy))
    there.step()
    row = there.state.rows.request_ids.row_of["a"]
    assert there.state.rows.weights_versions(row).tolist() == [0, 0, 0, 1, 2]
