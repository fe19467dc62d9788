"""The CPU device, and its kernels against a loop over tokens and heads in float64, with NaN wherever nobody wrote."""

import itertools

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given
from hypothesis import strategies as st

from fstep.shell.cpu import BLOCKED_ROWS, CpuDevice, CpuKernels
from fstep.state import AttentionMeta, AttentionSpec, DeviceError, DeviceMeta, LayerKV, frozen_array, i32

KERNELS = CpuKernels()


# The device ----------------------------------------------------------------------------------------------------------


def test_put_packs_copies_into_one_buffer():
    arrays = (i32([1, 2, 3]), i32([]), frozen_array(np.arange(6, dtype=np.int32).reshape(2, 3)), i32([7]))
    tensors = CpuDevice().put(arrays)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.dtype == torch.int32
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for tensor in tensors:
        tensor.fill_(9)
    assert arrays[2].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert CpuDevice().put(()) == ()


def test_put_of_a_slice_and_of_one_array_are_copies_too():
    base = np.arange(12, dtype=np.int32).reshape(3, 4)
    (column,) = CpuDevice().put((base[:, 1],))
    assert column.tolist() == [1, 5, 9]
    column.fill_(0)
    assert base[1, 1] == 5


def test_put_takes_int32_alone():
    with pytest.raises(TypeError, match="int64"):
        CpuDevice().put((np.arange(3),))


def test_get_gives_read_only_copies_that_are_there_at_once():
    tensors = (torch.arange(6, dtype=torch.int32).view(2, 3).t(), torch.zeros(0, 4, dtype=torch.int32))
    future = CpuDevice().get(tensors)
    assert future.ready()
    first, second = future.wait()
    tensors[0].fill_(7)
    assert first.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (first.dtype, second.shape) == (np.int32, (0, 4))
    assert not first.flags.writeable
    assert CpuDevice().get(()).wait() == ()


@pytest.mark.parametrize("align", [1, 64, 96, 4096])
def test_memory_is_aligned(align):
    for nbytes in (0, 1, 1000):
        memory = CpuDevice().allocate(nbytes, align)
        assert memory.shape == (nbytes,)
        assert memory.dtype == torch.uint8
        assert nbytes == 0 or memory.data_ptr() % align == 0


def test_more_memory_than_there_is():
    with pytest.raises(DeviceError, match=f"nbytes={1 << 60} is more memory than the CPU gives"):
        CpuDevice().allocate(1 << 60)
    with pytest.raises(DeviceError, match="nbytes=-1 must be at least 0"):
        CpuDevice().allocate(-1)


def test_the_device_is_a_value():
    assert CpuDevice() == CpuDevice()
    assert len({CpuDevice(), CpuDevice()}) == 1
    assert CpuDevice().name == "cpu"


# Attention -----------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Batch:
    """A step's attention, and what must come out of it."""

    q: torch.Tensor
    layer: LayerKV
    meta: DeviceMeta
    spec: AttentionSpec
    expected: torch.Tensor  #: [T, num_heads, head_dim] float64


def make_batch(
    rows,
    block_size=4,
    heads=(4, 2),
    head_dim=8,
    padding=(0, 0),
    deal=False,
    features_first=False,
    seed=0,
    dtype=torch.float32,
):
    """A batch of `rows`, each (computed, scheduled) tokens. Every cell that no row has written is NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    spec = AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    more_tokens, more_reqs = padding
    seq_lens = [computed + scheduled for computed, scheduled in rows]
    num_tokens = sum(scheduled for _, scheduled in rows)
    blocks = [-(-length // block_size) for length in seq_lens]
    order = iter((1 + torch.randperm(sum(blocks) + 2, generator=generator)).tolist())
    table = np.zeros((len(rows) + more_reqs, max([*blocks, 1]) + 1), np.int32)
    pages = torch.full((2, sum(blocks) + 3, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    q = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    expected = []
    start = 0
    for b, ((computed, scheduled), length) in enumerate(zip(rows, seq_lens, strict=True)):
        table[b, : blocks[b]] = list(itertools.islice(order, blocks[b]))
        kv = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length):
            block, offset = table[b, position // block_size], position % block_size
            pages[:, int(block), :, offset] = kv[:, position]
        for n in range(scheduled):
            expected.append(attend(q[start + n].double(), kv[:, : computed + n + 1].double(), spec))
        start += scheduled
    ends = np.cumsum([0, *(scheduled for _, scheduled in rows)])
    dealt = np.minimum(num_tokens + np.arange(1, more_reqs + 1), num_tokens + more_tokens) if deal else num_tokens
    host = AttentionMeta(
        query_start_loc=i32([*ends, *np.broadcast_to(dealt, more_reqs)]),
        seq_lens=i32([*seq_lens, *[0] * more_reqs]),
        slot_mapping=i32([0] * num_tokens + [-1] * more_tokens),
        block_table=frozen_array(table),
        num_reqs=len(rows),
        num_tokens=num_tokens,
        max_query_len=max([scheduled for _, scheduled in rows], default=0),
        max_seq_len=max(seq_lens, default=0),
    )
    arrays = (host.query_start_loc, host.seq_lens, host.slot_mapping, host.block_table)
    meta = DeviceMeta(host, *CpuDevice().put(arrays))
    q = torch.cat((q, torch.full((more_tokens, num_heads, head_dim), torch.nan, dtype=dtype)))
    if features_first:
        q = q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return Batch(q, LayerKV(pages[0], pages[1]), meta, spec, torch.stack(expected) if expected else q.double()[:0])


def attend(q, kv, spec):
    """One token's attention over the keys and values that it sees, head by head: `[num_heads, head_dim]`."""
    share = spec.num_heads // spec.num_kv_heads
    out = []
    for head in range(spec.num_heads):
        keys, values = kv[:, :, head // share]
        out.append(torch.softmax(keys @ q[head] * spec.scale, dim=0) @ values)
    return torch.stack(out)


def check(batch, planned=True, atol=2e-6):
    meta = batch.meta
    if planned:
        meta = evolve(meta, plan=KERNELS.plan(meta, batch.spec.num_kv_heads, batch.layer.k.shape[2]))
    before = [batch.layer.k.clone(), batch.layer.v.clone(), batch.q.clone()]
    out = KERNELS.attention(batch.q, batch.layer, meta, batch.spec)
    assert out.shape == batch.q.shape
    assert out.dtype == batch.q.dtype
    num_tokens = meta.host.num_tokens
    torch.testing.assert_close(out[:num_tokens].double(), batch.expected, rtol=0, atol=atol)
    assert out[num_tokens:].isfinite().all()
    for was, now in zip(before, (batch.layer.k, batch.layer.v, batch.q), strict=True):
        torch.testing.assert_close(was, now, rtol=0, atol=0, equal_nan=True)


ROW = st.one_of(
    st.tuples(st.integers(0, 40), st.just(1)),
    st.tuples(st.integers(0, 20), st.integers(0, 12)),
    st.tuples(st.just(0), st.integers(1, 20)),
)


@given(
    rows=st.lists(ROW, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (9, 3), (6, 1)]),
    head_dim=st.sampled_from([2, 8, 16]),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 3)),
    deal=st.booleans(),
    features_first=st.booleans(),
    planned=st.booleans(),
    seed=st.integers(0, 1000),
)
@example([(130, 1), (3, 1), (300, 1), (127, 1), (128, 2)], 16, (9, 3), 8, (0, 0), False, True, True, 1)
@example([(5, 1), (0, 1), (9, 1)], 4, (9, 3), 8, (0, 0), False, False, True, 2)
@example([(140, 20), (0, 140), (0, 4), (3, 5)], 16, (4, 2), 8, (3, 1), True, True, True, 3)
@example([(0, 0), (4, 1), (7, 0)], 4, (4, 2), 8, (2, 2), True, False, True, 4)
@example([], 4, (4, 2), 8, (3, 2), True, False, True, 5)
@example([], 4, (4, 2), 8, (0, 0), False, False, True, 6)
def test_attention_is_that_of_a_loop(rows, block_size, heads, head_dim, padding, deal, features_first, planned, seed):
    if padding[1] == 0:
        deal = False
    check(make_batch(rows, block_size, heads, head_dim, padding, deal, features_first, seed), planned)


@pytest.mark.parametrize("rows", [[(70, 1), (3, 1)], [(40, 1), (0, 9), (5, 7), (6, 3)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(rows, dtype):
    check(make_batch(rows, 16, (9, 3), 16, dtype=dtype), atol=2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_attention_may_be_repeated_bit_by_bit():
    batch = make_batch([(70, 1), (3, 1), (5, 9), (200, 2)], 16, (9, 3), 64)
    first, second = (KERNELS.attention(batch.q, batch.layer, batch.meta, batch.spec) for _ in range(2))
    assert torch.equal(first, second)


# KV writes -----------------------------------------------------------------------------------------------------------


def pages(num_blocks=5, heads=3, block_size=4, head_dim=2, dtype=torch.float32):
    return LayerKV(*(torch.full((num_blocks, heads, block_size, head_dim), 0.5, dtype=dtype) for _ in "kv"))


@given(
    slots=st.lists(st.one_of(st.just(-1), st.integers(0, 19)), max_size=12),
    features_first=st.booleans(),
)
@example([-1], False)
@example([19, -1], True)
@example([], False)
def test_kv_goes_to_its_slots_and_nowhere_else(slots, features_first):
    slots = [slot for n, slot in enumerate(slots) if slot < 0 or slot not in slots[:n]]
    layer, expected = pages(), pages()
    k, v = torch.randn(2, len(slots), 3, 2)
    for n, slot in enumerate(slots):
        if slot >= 0:
            expected.k[slot // 4, :, slot % 4], expected.v[slot // 4, :, slot % 4] = k[n], v[n]
        else:
            k[n] = v[n] = torch.nan
    if features_first:
        k, v = (x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in (k, v))
    KERNELS.write_kv(layer, k, v, torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(layer.k, expected.k)
    assert torch.equal(layer.v, expected.v)


def test_slot_minus_one_is_not_the_last_slot():
    layer = pages()
    new = torch.full((2, 3, 2), torch.nan)
    KERNELS.write_kv(layer, new, new, torch.tensor([-1, -1], dtype=torch.int32))
    assert (layer.k == 0.5).all()
    assert (layer.v == 0.5).all()


def test_kv_is_kept_in_the_caches_dtype():
    layer = pages(dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 3, 2)
    KERNELS.write_kv(layer, k, v, torch.tensor([6], dtype=torch.int32))
    assert torch.equal(layer.k[1, :, 2], k[0].bfloat16())
    assert torch.equal(layer.v[1, :, 2], v[0].bfloat16())


# Products ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 31, 64, BLOCKED_ROWS.stop - 1, BLOCKED_ROWS.stop])
@pytest.mark.parametrize("out", [96, 64, 61, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("features_first", [False, True])
def test_linear_is_a_product(num_tokens, out, biased, features_first):
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, 40, generator=generator), torch.randn(out, 40, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    if features_first:
        x = x.t().contiguous().t()
    given = [x.clone(), weight.clone()]
    made = KERNELS.linear(x, weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(made.double(), expected, rtol=0, atol=1e-4)
    assert made.dtype == torch.float32
    assert torch.equal(x, given[0])
    assert torch.equal(weight, given[1])


def test_a_row_of_nan_stays_alone():
    x = torch.randn(8, 40)
    weight = torch.randn(96, 40)
    clean = KERNELS.linear(x, weight)
    x[5] = torch.nan
    poisoned = KERNELS.linear(x, weight)
    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[5].isnan().all()


def test_linear_in_half_precision():
    x, weight = torch.randn(8, 40).bfloat16(), torch.randn(96, 40).bfloat16()
    made = KERNELS.linear(x, weight)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), x.double() @ weight.double().T, rtol=2e-2, atol=5e-2)
