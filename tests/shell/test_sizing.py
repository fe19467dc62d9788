"""How many blocks a cache has."""

from fstep.shell import plan_for
from fstep.shell.sizing import KV_MEMORY_MOST, bytes_per_block
from fstep.state import CacheConfig, SchedLimits
from fstep.testing.toy import ToyTransformer

MODEL = ToyTransformer(max_model_len=100)


def test_by_default_what_all_requests_could_need():
    plan = plan_for(MODEL, CacheConfig(block_size=16), SchedLimits(max_num_seqs=3))
    assert plan.groups[0].num_blocks == 3 * 7 + 1  # with the null block
    assert plan.max_model_len == 100


def test_by_default_no_more_than_the_memory_that_is_there():
    plan = plan_for(MODEL, CacheConfig(block_size=16), SchedLimits(max_num_seqs=10**9))
    assert plan.groups[0].num_blocks * bytes_per_block(MODEL, 16) <= KV_MEMORY_MOST + bytes_per_block(MODEL, 16)


def test_a_number_that_is_given_counts():
    plan = plan_for(MODEL, CacheConfig(block_size=4, num_blocks=5, max_model_len=20), SchedLimits())
    assert (plan.groups[0].num_blocks, plan.groups[0].block_size, plan.max_model_len) == (6, 4, 20)


def test_bytes_of_a_block():
    assert bytes_per_block(MODEL, 16) == 2 * 2 * 16 * 16 * 4  # layers, K and V, tokens, width, float32
