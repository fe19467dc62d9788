"""Faults of KV slots, blocks and the prefix cache."""

import itertools

import numpy as np
import pytest
from attrs import evolve

from fstep import ops
from fstep.ops import groups, prefix
from fstep.state import BatchDescriptor, BlockPool, CacheKey, NewRequest, i32
from fstep.testing import RollingModel
from tests.cases.conftest import Small
from tests.ops.conftest import GREEDY, Batch, new


def hit_of(small, name, key):
    """Runs the prompt 1 … 9 under a key; how many of its tokens were found in the cache."""
    small.runner.add(NewRequest(name, [*range(1, 10)], evolve(GREEDY, max_tokens=1), key))
    report = small.step()
    small.run()
    return report.schedule.new[0].num_computed_tokens


def test_c017_an_adapters_name_is_no_salt(small):
    keys = [CacheKey(lora_name="S"), CacheKey(salt="S"), CacheKey(lora_name="S", salt="S"), CacheKey()]
    assert [hit_of(small, f"first-{n}", key) for n, key in enumerate(keys)] == [0, 0, 0, 0]
    assert [hit_of(small, f"again-{n}", key) for n, key in enumerate(keys)] == [8, 8, 8, 8]


def test_c018_two_adapters_of_one_name(small):
    """Adapters aren't built; the key that tells them apart is: the generation counts the loads of a name."""
    one, other = CacheKey(lora_name="style"), CacheKey(lora_name="style", lora_generation=1)
    assert [hit_of(small, name, key) for name, key in (("a", one), ("b", other), ("c", one), ("d", other))] == [
        0,
        0,
        8,
        8,
    ]
    small.runner.sched = ops.reweigh(small.runner.sched, 1)
    assert hit_of(small, "e", one) == 0


def test_c021_an_old_hash_does_not_point_to_a_reused_block():
    small = Small(num_blocks=3)
    prompts = {"a": [1, 2, 3, 4, 5], "b": [*range(11, 23)], "again": [1, 2, 3, 4, 5]}
    (of_a,), of_b, _ = (next(iter(prefix.all_hashes(small.plan, i32(ids), CacheKey()))) for ids in prompts.values())
    hits = {}
    for name, prompt in prompts.items():
        small.add(name, prompt, max_tokens=1)
        hits[name] = small.step().schedule.new[0].num_computed_tokens
        small.run()
        expected = {"a": {of_a}, "b": set(of_b), "again": {of_a, of_b[0]}}[name]  # the end of a prompt goes first
        assert set(small.pool.hashes.values()) <= expected
        assert (small.pool.find(of_a) is None) == (name == "b")
    assert hits == {"a": 0, "b": 0, "again": 0}
    assert small.tokens["a"] == small.tokens["again"]


@pytest.mark.parametrize("produced", [1, 2, 3])
def test_c022_a_resumed_request_finds_its_own_blocks(produced):
    small = Small(num_blocks=8, block_size=2)
    small.add("a", [1, 2, 3, 4, 5, 6], max_tokens=6)
    for _ in range(produced):
        small.step()
    small.preempt("a")
    report = small.step()
    (back,) = report.schedule.resumed
    assert back.num_computed_tokens == (6 + produced - 1) // 2 * 2
    assert back.num_computed_tokens + report.schedule.num_scheduled_tokens[0] == 6 + produced
    assert small.run().tokens["a"] == small.alone("a")


@pytest.mark.parametrize("model", [None, RollingModel], ids=["attention", "recurrent"])
def test_c028_nan_in_unowned_blocks_and_padding_is_never_seen(model):
    """The property tests poison every step (`poison`); here the whole cache is NaN from the beginning."""
    kinds = {} if model is None else {"model": model}
    small = Small(capture=(BatchDescriptor(8, 8), BatchDescriptor(16, 16)), **kinds)
    for layer in small.runner.kv.layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    for name, length in (("a", 3), ("b", 4), ("c", 5)):
        small.add(name, range(1, length + 1), max_tokens=6)
    small.run()
    assert all(small.tokens[name] == small.alone(name) for name in "abc")


def test_c030_a_block_freed_twice_in_one_call():
    full = BlockPool.full(5)
    (block,), pool = full.take(1)
    with pytest.raises(ValueError, match=rf"\[{block}, {block}\]"):
        pool.give(i32([block, block]))
    assert pool.num_free == 3
    blocks, empty = pool.give(i32([block])).take(4)
    assert (len(set(blocks.tolist())), empty.num_free) == (4, 0)


def test_c035_each_request_has_its_own_pages():
    lengths, tables = {"a": 5, "b": 4, "c": 9}, {"a": [5, 2], "b": [7], "c": [9, 1, 3]}
    batch = Batch()
    inputs = batch.prepare(lengths, tables, new=[new(name, length) for name, length in lengths.items()])
    expected = [20, 21, 22, 23, 8, 28, 29, 30, 31, 36, 37, 38, 39, 4, 5, 6, 7, 12]
    assert inputs.slot_mapping[0].tolist() == expected
    batch.commit([50, 51, 52])
    assert batch.prepare(dict.fromkeys(lengths, 1), {"b": [8]}).slot_mapping[0].tolist() == [9, 32, 13]


def test_c036_a_kernels_shorter_blocks_are_where_the_managers_are():
    table = np.array([[3, 0]], np.int32)
    assert groups.kernel_block_size(8, [2, 16]) == 2
    (short,) = groups.kernel_blocks(table, 8, 2).tolist()
    assert short == [12, 13, 14, 15, 0, 1, 2, 3]
    slots = [short[token // 2] * 2 + token % 2 for token in range(11)]
    assert slots == [int(table[0, token // 8]) * 8 + token % 8 for token in range(11)]
    assert (slots[5], slots[8], slots[10]) == (29, 0, 2)


@pytest.mark.parametrize("block_size", [256, 512, 1024])
def test_c039_pages_of_attention_and_state_are_equal(block_size):
    """A shorter block is made longer, a longer one pads the state's page: no page runs into the next."""
    state, attention = groups.Page(1, 8 * 64 * 64 * 4), groups.Page(block_size, block_size * 1 * 128 * 2)
    made = groups.unify_pages([state, attention])
    largest = max(state.size_bytes, attention.size_bytes)
    assert [page.size_bytes for page in made] == [largest, largest]
    assert made[1].block_size * 256 <= largest
    assert made[1].block_size == max(block_size, 512)


PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 7, 8], "c": [1, 2, 9, 9]}


@pytest.mark.parametrize("order", [*itertools.permutations("abc")], ids="".join)
@pytest.mark.parametrize("together", [False, True])
def test_c038_free_cached_and_held_blocks_add_up_to_the_pool(order, together):
    small = Small(num_blocks=12, block_size=2)
    for name in order:
        small.add(name, PROMPTS[name], max_tokens=2)
        if not together:
            small.run()
    small.run()
    assert sorted(small.pool.free.tolist()) == [*range(1, 13)]  # cached ones are among the free, each once
    assert not small.pool.ref_counts.any()
    assert set(small.pool.hashes) <= set(range(1, 13))
    assert all(small.tokens[name] == small.alone(name) for name in order)


def books(sched):
    """All that a pool knows."""
    pool = sched.pools[0]
    return pool.free.tolist(), pool.ref_counts.tolist(), pool.hashes


def test_c169_an_allocation_that_fails_leaves_nothing():
    small = Small(num_blocks=4)
    hits, failed = [], 0
    for number in range(200):
        a, b, c, d = (f"{name}{number}" for name in "abcd")
        small.add(a, range(1, 2 + (number + 4) % 8), max_tokens=8)
        small.step()
        without = small.runner.sched
        small.add(b, range(11, 23), max_tokens=1)
        todo, tried = ops.schedule(small.runner.sched, small.state)
        if not todo.new:
            failed += 1
            assert books(tried) == books(ops.schedule(without, small.state)[1])
        small.runner.abort(b)
        small.run()
        small.add(c, range(11, 23), max_tokens=1)
        small.add(d, [31, 32, 33], max_tokens=1)
        hits += [each.num_computed_tokens for each in small.step().schedule.new if each.request_id == c]
        small.run()
        assert small.tokens[c] == small.alone(c)
    assert hits[0] == 0
    assert failed > 100
