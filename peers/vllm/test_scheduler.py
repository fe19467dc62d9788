"""vLLM's scheduler under the state machine of `fstep.testing`: nothing is found in it, and faults planted in it are."""

import pytest
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler

from fstep.state import Plan
from fstep.testing.events import EVENTS
from fstep.testing.machine import check_runner
from fstep.testing.strategies import a_request
from peers.vllm.scheduler import VOCAB_SIZE, VllmRunner

LONGEST = 16
REQUESTS = a_request(Plan(vocab_size=VOCAB_SIZE, max_model_len=LONGEST, groups=()))
CONFIGS = {
    "block_size": st.integers(1, 4),
    "spare_blocks": st.integers(0, 6),
    "max_num_seqs": st.integers(1, 4),
    "max_num_batched_tokens": st.integers(1, 12),
    "prefix_caching": st.sampled_from([True, True, False]),
    "policy": st.sampled_from(["fcfs", "priority"]),
}
SELDOM = {"step with 0 tokens", "passed over in a step", "padded step"}  #: events in under 1 % of the examples


def engine(runner):
    """A runner with so many blocks that the longest request fits, and some to spare."""

    def make(block_size, spare_blocks, **config):
        return runner(-(-LONGEST // block_size) + 1 + spare_blocks, block_size, max_model_len=LONGEST, **config)

    make.__name__ = runner.__name__
    return make


def test_nothing_is_found_in_vllms_scheduler():
    found = check_runner(engine(VllmRunner), configs=CONFIGS, requests=REQUESTS, examples=3000, random_seed=1)
    print(f"\n{found}")  # noqa: T201 - the report of the search
    assert found.unseen == ()
    assert {each.name for each in EVENTS if found.share(each.name) < 0.01} == SELDOM


class FreesShared(BlockPool):
    """Fault: a block that several requests hold is free as soon as one of them ends."""

    def free_blocks(self, ordered_blocks):
        blocks = list(ordered_blocks)
        for each in blocks:
            each.ref_cnt = 1
        super().free_blocks(blocks)


class KeepsHash(BlockPool):
    """Fault: a block that is handed out again is still found by what it held."""

    def _maybe_evict_cached_block(self, block):  # noqa: ARG002 - as the one that it replaces
        return False


class KeepsCount(Scheduler):
    """Fault: a preempted request keeps its count of computed tokens."""

    def _preempt_request(self, request, *args, **kwargs):
        computed = request.num_computed_tokens
        super()._preempt_request(request, *args, **kwargs)
        request.num_computed_tokens = computed


@pytest.mark.parametrize("fault", [FreesShared, KeepsHash, KeepsCount])
def test_a_fault_planted_in_it_is_found(fault):
    class Planted(VllmRunner):
        def scheduler_of(self, config, layout):
            scheduler = super().scheduler_of(config, layout)
            part = scheduler if issubclass(fault, Scheduler) else scheduler.kv_cache_manager.block_pool
            part.__class__ = fault
            return scheduler

    with pytest.raises(Exception) as caught:  # noqa: PT011 - a check, or what vLLM raises itself
        check_runner(engine(Planted), configs=CONFIGS, requests=REQUESTS, examples=2000, random_seed=1)
    print(f"\n{fault.__name__}: {caught.value!r}\n{caught.value.__notes__[0]}")  # noqa: T201 - the report of the search
    assert caught.value.__notes__[0].count("runner.add(") <= 6
