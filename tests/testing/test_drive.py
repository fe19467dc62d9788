"""Whole runs: a sound one passes, and a fault in a scheduler or in a kernel is found within a few runs."""

import pytest
from attrs import evolve, frozen
from hypothesis import HealthCheck, Phase, given, settings

from fstep import ops
from fstep.shell.cpu import CpuDevice
from fstep.shell.kv import new_kv
from fstep.shell.torch_kernels import TorchKernels
from fstep.state import (
    Env,
    FinishReason,
    KVGroup,
    NewRequest,
    Plan,
    SamplingParams,
    SchedLimits,
    Schedule,
)
from fstep.testing import CheckError, HashModel, check_against_reference, play
from fstep.testing.strategies import Script, scripts

PLAN = Plan(32, 12, (KVGroup(5, 4, (0,)),), eos_token_ids=(1,))
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
TWO = Script(
    PLAN,
    SchedLimits(max_num_batched_tokens=4),
    arrivals=((0, NewRequest("a", [7] * 6, GREEDY)), (1, NewRequest("b", [8], GREEDY))),
)
MODEL = HashModel(32, 12)


def play_on_cpu(script, device=None, **more):
    device = device or CpuDevice()
    model = HashModel(script.plan.vocab_size, script.plan.max_model_len)
    played = play(script, Env(model, {}, device), new_kv(script.plan, model.kv_specs(), device), **more)
    check_against_reference(model, script.plan, played.answers)
    return played


def test_a_run_gives_an_answer_to_each_arrival_and_counts_what_happened():
    played = play_on_cpu(TWO)
    assert [(len(each.token_ids), each.finish_reason) for each in played.answers] == [(6, "length"), (11, "length")]
    assert played.counts["tokens"] == 17
    assert played.counts["preemptions"] == played.counts["resumptions"] == 1
    assert played.counts["finished_length"] == 2
    assert played.counts["partial_prompts"] >= 1


def test_an_aborted_request_has_the_first_of_its_tokens():
    played = play_on_cpu(evolve(TWO, aborts=((4, "b"),)))
    answer = played.answers[1]
    assert answer.finish_reason is FinishReason.ABORT
    assert 0 < len(answer.token_ids) < 11
    assert played.counts["abort_running"] == 1


def test_a_request_aborted_in_the_queue_gets_nothing():
    played = play_on_cpu(evolve(TWO, limits=SchedLimits(max_num_seqs=1), aborts=((2, "b"),)))
    assert (played.answers[1].token_ids, played.answers[1].finish_reason) == ((), None)
    assert played.counts["abort_waiting"] == 1


def test_an_id_in_use_waits_until_it_is_free():
    again = evolve(TWO, arrivals=((0, TWO.requests[0]), (1, evolve(TWO.requests[1], request_id="a"))))
    played = play_on_cpu(again)
    assert [len(each.token_ids) for each in played.answers] == [6, 11]
    assert played.counts["id_again"] == 1


def test_every_step_is_seen():
    seen = []
    played = play_on_cpu(TWO, watch=lambda moment: seen.append(moment.after.kv_epoch))
    assert seen == list(range(1, played.counts["steps"] + 1))


def test_a_wrong_token_is_named():
    answer = play_on_cpu(TWO).answers[0]
    wrong = evolve(answer, token_ids=(*answer.token_ids[:-1], 99))
    with pytest.raises(CheckError, match="I1: request 'a': token_ids, finish_reason is"):
        check_against_reference(MODEL, PLAN, (wrong,))
    with pytest.raises(CheckError, match="I1"):
        check_against_reference(MODEL, PLAN, (evolve(answer, token_ids=answer.token_ids[:-1]),))
    with pytest.raises(CheckError, match="I1"):
        check_against_reference(MODEL, PLAN, (evolve(answer, finish_reason=FinishReason.ABORT),))


def lazy(sched, _):
    return Schedule(), sched


def gives_a_block_twice(sched, state):
    """Forgets that the last block was taken."""
    todo, after = ops.schedule(sched, state)
    taken = todo.new_blocks[0].values[-1:]
    pools = tuple(pool.give(taken) for pool in after.pools[:1]) + after.pools[1:] if len(taken) else after.pools
    return todo, evolve(after, pools=pools)


def loses_blocks(sched, state):
    """Doesn't take back what the finished ones held."""
    todo, after = ops.schedule(sched, state)
    return todo, evolve(after, pools=sched.pools) if todo.finished and not todo.request_ids else after


def test_a_scheduler_that_does_nothing_is_found():
    with pytest.raises(CheckError, match="progress: run: steps is not done"):
        play_on_cpu(TWO, scheduler=lazy, max_steps=20)


@frozen
class WritesPadding(TorchKernels):
    """Takes slot -1 for an index: the last slot of the cache."""

    def write_kv(self, layer, k, v, slots):
        block_size = layer.k.shape[2]
        layer.k[slots // block_size, :, slots % block_size] = k
        layer.v[slots // block_size, :, slots % block_size] = v


@frozen
class WritesLate(TorchKernels):
    """Leaves out the last token."""

    def write_kv(self, layer, k, v, slots):
        super().write_kv(layer, k[:-1], v[:-1], slots[:-1])


@frozen
class SwapsKAndV(TorchKernels):
    """Puts K where V belongs."""

    def write_kv(self, layer, k, v, slots):
        super().write_kv(layer, v, k, slots)


class FaultyDevice:
    """The CPU with other kernels."""

    def __init__(self, kernels):
        cpu = CpuDevice()
        self.name, self.kernels = "faulty", kernels
        self.allocate, self.put, self.get = cpu.allocate, cpu.put, cpu.get


FAULTS = {
    "a block given twice": ("I18", {"scheduler": gives_a_block_twice}),
    "blocks lost": ("I18", {"scheduler": loses_blocks}),
    "padding written": ("I1", {"device": FaultyDevice(WritesPadding())}),
    "a token not written": ("I1", {"device": FaultyDevice(WritesLate())}),
    "K for V": ("I1", {"device": FaultyDevice(SwapsKAndV())}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """Within 100 runs; it is not shrunk here."""
    invariant, parts = FAULTS[fault]

    @settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(scripts())
    def holds(script):
        play_on_cpu(script, **parts)

    with pytest.raises(CheckError, match=f"^{invariant}: "):
        holds()
