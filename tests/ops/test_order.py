"""The order of a batch and its parts, against loops and against the values of peers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.ops import order
from fstep.state import ConfigError, RowOrder
from tests.ops.conftest import Batch, new

SMALL = st.integers(0, 6)
LENS = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@st.composite
def requests(draw):
    """Scheduled, computed and prompt tokens of a few requests."""
    some = draw(st.lists(st.tuples(st.integers(1, 5), SMALL, st.integers(1, 6)), max_size=8))
    return tuple([each[column] for each in some] for column in range(3))


def region_of(scheduled, computed, prompt, threshold):
    if computed == 0:
        return order.Region.FIRST_CHUNK
    if scheduled > threshold:
        return order.Region.LONG_EXTEND
    return order.Region.DECODE if computed >= prompt else order.Region.SHORT_EXTEND


@given(requests(), st.integers(1, 4))
def test_regions_and_a_stable_order(columns, threshold):
    region = order.regions(*columns, threshold)
    assert region.tolist() == [region_of(*each, threshold) for each in zip(*columns, strict=True)]
    places = order.decode_first(region).tolist()
    assert places == sorted(range(len(region)), key=lambda b: (region[b], b))


@pytest.mark.parametrize(
    ("columns", "threshold", "region", "places"),
    [
        (([100, 1, 200, 1], [100, 10, 200, 20], [200, 10, 400, 20]), 1, [2, 0, 2, 0], [1, 3, 0, 2]),
        (([1, 1, 1, 1], [30, 40, 30, 9], [31, 40, 64, 9]), 1, [1, 0, 1, 0], [1, 3, 0, 2]),
        (([3, 3, 1, 8], [10, 12, 0, 5], [64, 12, 1, 64]), 3, [1, 0, 3, 2], [1, 0, 3, 2]),
    ],
)
def test_regions_as_a_peer_has_them(columns, threshold, region, places):
    found = order.regions(*columns, threshold)
    assert found.tolist() == region
    assert order.decode_first(found).tolist() == places


@given(LENS, st.integers(1, 5), st.booleans(), SMALL)
def test_decodes_are_the_leading_short_requests(lens, threshold, uniform, padding):
    decodes = 0
    while decodes < len(lens) and lens[decodes] <= threshold and (lens[decodes] == lens[0] or not uniform):
        decodes += 1
    split = order.split_decodes_prefills(lens, threshold, uniform, sum(lens) + padding)
    last = padding * (decodes == len(lens))
    assert (split.num_decodes, split.num_decode_tokens) == (decodes, sum(lens[:decodes]) + last)
    assert split.num_decodes + split.num_prefills == len(lens)
    assert split.num_decode_tokens + split.num_prefill_tokens == sum(lens) + padding


@given(st.lists(st.tuples(st.integers(1, 5), SMALL), max_size=8), st.integers(1, 4))
def test_decodes_extends_and_prefills_make_up_the_batch(some, threshold):
    columns = ([n for n, _ in some], [c for _, c in some], [0] * len(some))
    places = order.decode_first(order.regions(*columns, threshold))
    some = [some[b] for b in places]
    lens, seq_lens = [n for n, _ in some], [n + c for n, c in some]
    split = order.split_decodes_extends_prefills(lens, seq_lens, threshold)
    decodes = next((b for b, n in enumerate(lens) if n > threshold), len(lens))
    extends = next((b for b in range(decodes, len(lens)) if seq_lens[b] == lens[b]), len(lens)) - decodes
    assert (split.num_decodes, split.num_extends) == (decodes, extends)
    assert split.num_prefills == len(lens) - decodes - extends
    assert split.num_decode_tokens == sum(lens[:decodes])
    assert split.num_extend_tokens == sum(lens[decodes : decodes + extends])
    assert split.num_prefill_tokens == sum(lens[decodes + extends :])


def test_splits_as_a_peer_has_them():
    assert order.split_decodes_prefills([2, 1, 2, 4, 5, 6, 7, 8], 4, True) == order.Split(1, 7, 2, 33)
    assert order.split_decodes_prefills([2, 1, 3, 4, 5, 6, 7, 8], 4) == order.Split(4, 4, 10, 26)
    mixed = order.split_decodes_extends_prefills([1, 2, 4, 5, 6], [10, 11, 20, 5, 6], 3)
    assert mixed == order.Split(2, 2, 3, 11, 1, 4)
    assert order.split_decodes_prefills([], 1) == order.Split(0, 0, 0, 0)


@given(st.lists(st.tuples(SMALL, SMALL), max_size=6))
def test_tokens_past_the_prompts_come_first(requests):
    starts = np.cumsum([0, *(count for count, _ in requests)])
    ahead, behind = [], []
    for start, (count, prompt) in zip(starts.tolist(), requests, strict=False):
        behind += range(start, start + min(prompt, count))
        ahead += range(start + min(prompt, count), start + count)
    places, num_decode_tokens = order.decode_tokens_first(starts, [prompt for _, prompt in requests])
    assert (places.tolist(), num_decode_tokens) == (ahead + behind, len(ahead))


@given(LENS, st.data())
def test_query_start_loc_of_some_requests(lens, data):
    start = data.draw(st.integers(0, len(lens)))
    stop = data.draw(st.integers(start, len(lens)))
    whole = np.cumsum([0, *lens])
    assert order.query_start_loc_of(whole, start, stop).tolist() == np.cumsum([0, *lens[start:stop]]).tolist()
    with pytest.raises(IndexError, match="of a batch of"):
        order.query_start_loc_of(whole, start, len(lens) + 1)


@given(LENS, st.integers(1, 4), SMALL, st.integers(1, 6) | st.none())
def test_every_token_is_in_one_micro_batch_and_its_request_too(lens, num_ubatches, padding, split_point):
    total = sum(lens)
    size = split_point or (total + padding) // num_ubatches
    if size < 1 or size * (num_ubatches - 1) >= total:
        with pytest.raises(ValueError, match="one would be empty"):
            order.ubatch_slices(lens, total + padding, num_ubatches, split_point)
        return
    owner = [b for b, count in enumerate(lens) for _ in range(count)]
    slices = order.ubatch_slices(lens, total + padding, num_ubatches, split_point)
    assert [token for each in slices for token in range(*each.tokens)] == list(range(total))
    for each in slices:
        assert sorted(set(owner[slice(*each.tokens)])) == list(range(*each.requests))
    *others, last = order.padded_ubatches(slices, total + padding, len(lens) + padding)
    assert tuple(others) == slices[:-1]
    assert last == ((slices[-1].requests[0], len(lens) + padding), (slices[-1].tokens[0], total + padding))


@given(st.integers(1, 12), SMALL, st.integers(1, 4))
def test_the_last_micro_batch_is_empty_when_padding_alone_would_fill_it(num_tokens, padding, num_ubatches):
    padded = num_tokens + padding
    last = list(range(padded))[padded // num_ubatches * (num_ubatches - 1) :]
    empty = not any(token < num_tokens for token in last)
    assert order.ubatch_last_empty(num_tokens, padded, num_ubatches) == empty


def test_micro_batches_as_a_peer_has_them():
    assert order.ubatch_slices([5, 1, 1, 9], 16, 2) == (((0, 4), (0, 8)), ((3, 4), (8, 16)))
    assert order.ubatch_slices([8, 8], 16, 2, 4) == (((0, 1), (0, 4)), ((0, 2), (4, 16)))
    nine = order.ubatch_slices([1] * 9, 12, 3)
    assert nine == (((0, 4), (0, 4)), ((4, 8), (4, 8)), ((8, 9), (8, 9)))
    assert order.padded_ubatches(nine, 12, 12)[-1] == ((8, 12), (8, 12))


@given(st.lists(st.tuples(SMALL, SMALL), max_size=6))
def test_a_value_for_each_token(some):
    values, counts = [value for value, _ in some], [count for _, count in some]
    naive = [value for value, count in some for _ in range(count)]
    assert order.expand_to_tokens(values, np.cumsum(counts, dtype=int)).tolist() == naive


State = order.AttentionState


@pytest.mark.parametrize(
    ("computed", "scheduled", "drafts", "chunked", "mtp", "state"),
    [
        ([0, 0], [5, 7], [0, 0], True, False, State.PREFILL_NO_CACHE),
        ([0, 0], [1, 1], [0, 0], True, True, State.PREFILL_NO_CACHE),
        ([9, 4], [3, 1], [2, 0], True, True, State.SPECULATIVE),
        ([9, 4], [1, 1], [0, 0], True, True, State.SPECULATIVE),
        ([9, 4], [3, 1], [2, 0], False, False, State.CHUNKED_PREFILL),
        ([9, 0], [1, 1], [0, 0], False, False, State.DECODE_ONLY),
        ([16, 4], [8, 1], [0, 0], True, True, State.CHUNKED_PREFILL),
        ([16, 16], [8, 4], [0, 0], False, False, State.PREFILL_CACHE_HIT),
    ],
)
def test_the_attention_state_of_a_step(computed, scheduled, drafts, chunked, mtp, state):
    assert order.attention_state(computed, scheduled, drafts, chunked, mtp) is state


def test_prepare_takes_decodes_first_and_rows_stay():
    batch = Batch(order=RowOrder(decode_threshold=1))
    batch.prepare({"a": 2, "b": 3}, {"a": [1], "b": [2]}, new=(new("a", 6), new("b", 3)))
    batch.commit([-1, 50])
    inputs = batch.prepare({"c": 5, "a": 3, "b": 1}, {"c": [3, 4], "a": [5]}, new=(new("c", 5),))
    rows = batch.state.rows
    assert rows.request_ids[:3] == ("a", "b", "c")
    assert batch.state.step.schedule.request_ids == ("b", "a", "c")
    new_blocks = batch.state.step.schedule.new_blocks[0]
    assert [new_blocks[b].tolist() for b in range(3)] == [[], [5], [3, 4]]
    assert inputs.rows.tolist() == [1, 0, 2]
    assert inputs.num_scheduled_tokens.tolist() == [1, 3, 5]
    assert inputs.positions.tolist() == [3, 2, 3, 4, 0, 1, 2, 3, 4]
    assert inputs.slot_mapping[0].tolist() == [11, 6, 7, 20, 12, 13, 14, 15, 16]
    state = ops.build_meta(ops.pad(batch.state))
    assert state.step.meta.groups[0].block_table.tolist() == [[2, 0], [1, 5], [3, 4]]
    events = batch.commit([60, -1, 70])
    assert [(event.request_id, event.row, event.token_ids) for event in events] == [("b", 1, (60,)), ("c", 2, (70,))]
    assert batch.state.rows.output(1).tolist() == [50, 60]


def test_a_schedule_in_order_already_is_not_copied():
    batch = Batch(order=RowOrder(decode_threshold=1))
    schedule = batch.schedule({"a": 2, "b": 3}, {"a": [1], "b": [2]}, new=(new("a", 2), new("b", 3)))
    assert ops.prepare(batch.state, schedule).step.schedule is schedule


def test_a_threshold_below_one_is_refused():
    with pytest.raises(ConfigError, match="decode_threshold=0: must be at least 1"):
        RowOrder(decode_threshold=0)
