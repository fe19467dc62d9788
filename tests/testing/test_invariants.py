"""Each check passes where its invariant holds, and fails on a step or a model with a fault planted."""

import pytest
from attrs import evolve, frozen

import fstep.testing
from fstep.state import BatchDescriptor, CheckError, Hidden, KVGroup, NewRequest, Plan, SamplingParams, SchedLimits, i32
from fstep.testing import (
    INVARIANTS,
    HashModel,
    StepRunner,
    check_forks,
    check_hit,
    check_isolated,
    check_padding,
    check_permuted,
    check_persistent,
    check_preempted,
    check_repeated,
    check_split,
)

PLAN = Plan(64, 32, (KVGroup(24, 4, (0,)),))
NEW = NewRequest("new", [0, 1, 4, 1, 5, 9], SamplingParams(temperature=0, max_tokens=5))
LIMITS = SchedLimits(max_num_batched_tokens=9)


@frozen
class CrowdedModel(HashModel):
    """A hash that depends on how many tokens the batch has."""

    def hidden(self, params, x, kv, kernels, taps=()):
        made = super().hidden(params, x, kv, kernels, taps)
        return Hidden(made.states + len(x.positions), made.taps)


def run(steps, model=None):
    """A runner of three requests after some steps, and clones of its cache from before the last one."""
    runner = StepRunner(PLAN, LIMITS, model=model)
    for number, name in enumerate("xyz"):
        prompt = [number, 1, 4, 1, 5, 9, 2][: 5 + number]
        runner.add(NewRequest(name, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)))
    for _ in range(steps - 1):
        runner.step()
    before = [runner.kv.clone() for _ in range(5)]
    runner.step()
    return runner, before


@pytest.fixture
def sound():
    return run(2)


def with_logits(moment, change):
    """The step as if `forward` had given other logits."""
    step = moment.forwarded.step
    output = evolve(step.output, logits=change(step.output.logits))
    return evolve(moment, forwarded=evolve(moment.forwarded, step=evolve(step, output=output)))


def turned(logits):
    return logits.roll(1, 0)


def test_every_invariant_has_its_checks_or_a_reason():
    assert list(INVARIANTS) == [f"I{number}" for number in range(1, 21)]
    for each in INVARIANTS.values():
        assert bool(each.checks) != bool(each.open)
        assert all(callable(getattr(fstep.testing, name)) for name in each.checks)


def test_a_sound_step_passes(sound):
    runner, before = sound
    moment, env = runner.moment, runner.env
    assert moment.schedule.request_ids == ("x", "y", "z")
    check_padding(moment, env, before.pop(), capture=(BatchDescriptor(16, 4),))
    check_permuted(moment, env, before.pop(), i32([2, 0, 1]))
    check_split(moment, env, before.pop(), 1, 1)
    check_isolated(moment, env, before.pop(), 2)
    kv = check_repeated(moment, env)
    runner.kv = kv
    runner.step()
    check_persistent(moment, env, before.pop(), runner.kv)


def test_a_sound_state_passes(sound):
    runner, _ = sound
    state, rest = runner.state.detach(), (runner.sched, runner.env, runner.kv)
    check_preempted(state, *rest)
    check_hit(state, *rest, NEW)
    check_forks(state, *rest, "x", 2)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("I2", lambda moment, env, _: check_repeated(moment, env)),
        ("I3", lambda moment, env, kv: check_persistent(moment, env, kv, kv)),
        ("I8", check_padding),
        ("I9", lambda moment, env, kv: check_permuted(moment, env, kv, i32([2, 0, 1]))),
        ("I10", lambda moment, env, kv: check_split(moment, env, kv, 1, 1)),
        ("I17", lambda moment, env, kv: check_isolated(moment, env, kv, 0)),
    ],
)
def test_logits_that_another_way_would_not_give_are_found(name, check, sound):
    runner, before = sound
    with pytest.raises(CheckError) as caught:
        check(with_logits(runner.moment, turned), runner.env, before.pop())
    assert caught.value.invariant == name


def test_a_handle_or_a_state_that_is_accepted_and_should_not_be_is_found(sound):
    runner, before = sound
    with pytest.raises(CheckError, match=r"I2: .* accepted, expected DonatedError"):
        check_repeated(runner.moment, runner.env, runner.kv)
    runner, before = run(2)
    with pytest.raises(CheckError, match=r"I3: .* accepted, expected StaleStateError"):
        check_persistent(runner.moment, runner.env, before.pop(), runner.kv)


def test_a_cut_outside_the_chunk_is_refused(sound):
    runner, before = sound
    with pytest.raises(ValueError, match=r"cut=7: 'x' has \d tokens in this step"):
        check_split(runner.moment, runner.env, before.pop(), 0, 7)


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("I11", check_preempted),
        (
            "I12",
            lambda *state: check_hit(*state, NEW),
        ),
        ("I19", lambda *state: check_forks(*state, "x", 2)),
    ],
)
def test_a_model_that_sees_its_batch_is_found(name, check):
    runner, _ = run(2, CrowdedModel(64, 32))
    with pytest.raises(CheckError) as caught:
        check(runner.state.detach(), runner.sched, runner.env, runner.kv)
    assert caught.value.invariant == name
