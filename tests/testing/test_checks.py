"""What changes an argument is found, and NaN goes where it should."""

import numpy as np
import pytest
from attrs import evolve

from fstep import ops
from fstep.shell.cpu import CpuDevice
from fstep.shell.kv import new_kv
from fstep.state import (
    BatchDescriptor,
    BatchState,
    CheckError,
    Env,
    KVGroup,
    NewRequest,
    Plan,
    Ragged,
    SamplingParams,
    Schedule,
    i32,
)
from fstep.testing import HashModel, check_same, guarded, poison, snapshot

PLAN = Plan(32, 16, (KVGroup(8, 4, (0,)),), capture=(BatchDescriptor(8, 4),))


def running(counts=(5, 2), plan=PLAN, prompts=(6, 2)):
    """Requests x and y of 6 and 2 tokens, of which 5 and 2 run; `build_meta` done."""
    new = tuple(
        NewRequest(name, [7] * length, SamplingParams(temperature=0))
        for name, length in zip("xy", prompts, strict=True)
    )
    todo = Schedule(
        new=new,
        request_ids=("x", "y"),
        num_scheduled_tokens=i32(counts),
        new_blocks=(Ragged.of([(5, 2), (3,)]),),
    )
    return ops.build_meta(ops.pad(ops.prepare(BatchState.empty(plan, rows=2), todo)))


def with_column(state, **columns):
    return evolve(state, rows=evolve(state.rows, **{name: i32(values) for name, values in columns.items()}))


def test_poison_spares_computed_tokens_alone():
    kv = new_kv(PLAN, HashModel(32, 16).kv_specs(), CpuDevice())
    for layer in kv.layers:
        layer.k.zero_(), layer.v.zero_()
    state = with_column(running(), num_computed_tokens=[5, 2])
    poison(kv, state.detach())
    for pages in (kv.layers[0].k, kv.layers[0].v):
        assert (~pages.isnan()).flatten().nonzero().flatten().tolist() == [8, 12, 13, 20, 21, 22, 23]
    poison(kv, state.detach(), keep=("y",))
    assert (~kv.layers[0].k.isnan()).flatten().nonzero().flatten().tolist() == [12, 13]


def test_a_function_that_changes_its_argument_is_found():
    def careless(state):
        state.rows.num_tokens.setflags(write=True)
        state.rows.num_tokens[1] = 9
        return state

    with pytest.raises(CheckError, match=r"I2: argument of careless\(\): \[0\]\[0\]\.rows\.num_tokens is"):
        guarded(careless)(running())


def test_a_change_in_a_log_or_a_parameter_is_found():
    def rewrite(state):
        state.rows.tokens.arena.data[state.rows.tokens.map.rows[0], 3] = 1

    with pytest.raises(CheckError, match=r"\.rows\.tokens\[0\] is \[7, 7, 7, 1, 7, 7\], expected \[7, 7, 7, 7, 7, 7\]"):
        guarded(rewrite)(running())

    def tune(env):
        env.params["w"][0] = 1

    import torch

    with pytest.raises(CheckError, match=r"\.params\['w'\] is"):
        guarded(tune)(Env(HashModel(32, 16), {"w": torch.zeros(2)}, CpuDevice()))


def test_a_pure_function_passes_and_gives_its_result():
    assert guarded(lambda state, more: len(state.rows) + more)(running(), more=1) == 3


def test_what_others_append_to_a_log_is_no_change():
    state = running()

    def appends(state):
        return state.rows.tokens.append(np.array([0]), np.array([1]))

    before = snapshot(state)
    assert len(guarded(appends)(state)[0]) == 7
    assert snapshot(state) == before


def test_same_names_the_first_difference():
    check_same("I2", "state", running(), running())
    with pytest.raises(CheckError, match=r"I3: state: \.rows\.num_tokens is"):
        check_same("I3", "state", with_column(running(), num_tokens=[6, 3]), running())
    with pytest.raises(CheckError, match=r"I3: pair: \[1\] is 3, expected None"):
        check_same("I3", "pair", (1, 3), (1,))
