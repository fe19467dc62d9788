"""Each set of the CPU's kernels, against loops over tokens and heads in float64, with NaN wherever nobody wrote."""

import itertools

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import example, given
from hypothesis import strategies as st

from fstep.shell.cpu import CpuDevice
from fstep.shell.native import ISAS, NativeKernels, load_library
from fstep.shell.torch_kernels import BLOCKED_ROWS, TorchKernels
from fstep.state import AttentionMeta, AttentionSpec, DeviceMeta, LayerKV, frozen_array, i32

LIBRARY = load_library()


def kernel_sets():
    """Those in torch, and those in C for each instruction set of this processor."""
    yield pytest.param(TorchKernels(), id="torch")
    for isa in ISAS:
        there = LIBRARY is not None and LIBRARY.isa >= ISAS.index(isa)
        reason = "the kernels in C were not built" if LIBRARY is None else f"this processor has no {isa}"
        marks = () if there else pytest.mark.skip(reason=reason)
        yield pytest.param(NativeKernels(load_library(isa)) if there else None, id=isa, marks=marks)


every_kernels = pytest.mark.parametrize("kernels", list(kernel_sets()))


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


def check(kernels, batch, planned=True, atol=2e-6):
    meta = batch.meta
    if planned:
        meta = evolve(meta, plan=kernels.plan(meta, batch.spec.num_kv_heads, batch.layer.k.shape[2]))
    before = [batch.layer.k.clone(), batch.layer.v.clone(), batch.q.clone()]
    out = kernels.attention(batch.q, batch.layer, meta, batch.spec)
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


@every_kernels
@given(
    rows=st.lists(ROW, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (9, 3), (6, 1)]),
    head_dim=st.sampled_from([2, 8, 16, 64, 80]),
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
def test_attention_is_that_of_a_loop(
    kernels, rows, block_size, heads, head_dim, padding, deal, features_first, planned, seed
):
    if padding[1] == 0:
        deal = False
    check(kernels, make_batch(rows, block_size, heads, head_dim, padding, deal, features_first, seed), planned)


@every_kernels
@pytest.mark.parametrize("rows", [[(70, 1), (3, 1)], [(40, 1), (0, 9), (5, 7), (6, 3)]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(kernels, rows, dtype):
    check(kernels, make_batch(rows, 16, (9, 3), 16, dtype=dtype), atol=2e-2 if dtype == torch.bfloat16 else 3e-3)


@every_kernels
def test_attention_may_be_repeated_bit_by_bit(kernels):
    batch = make_batch([(70, 1), (3, 1), (5, 9), (200, 2)], 16, (9, 3), 64)
    first, second = (kernels.attention(batch.q, batch.layer, batch.meta, batch.spec) for _ in range(2))
    assert torch.equal(first, second)


# KV writes -----------------------------------------------------------------------------------------------------------


def pages(num_blocks=5, heads=3, block_size=4, head_dim=2, dtype=torch.float32):
    return LayerKV(*(torch.full((num_blocks, heads, block_size, head_dim), 0.5, dtype=dtype) for _ in "kv"))


@every_kernels
@given(
    slots=st.lists(st.one_of(st.just(-1), st.integers(0, 19)), max_size=12),
    features_first=st.booleans(),
)
@example([-1], False)
@example([19, -1], True)
@example([], False)
def test_kv_goes_to_its_slots_and_nowhere_else(kernels, slots, features_first):
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
    kernels.write_kv(layer, k, v, torch.tensor(slots, dtype=torch.int32))
    assert torch.equal(layer.k, expected.k)
    assert torch.equal(layer.v, expected.v)


@every_kernels
def test_slot_minus_one_is_not_the_last_slot(kernels):
    layer = pages()
    new = torch.full((2, 3, 2), torch.nan)
    kernels.write_kv(layer, new, new, torch.tensor([-1, -1], dtype=torch.int32))
    assert (layer.k == 0.5).all()
    assert (layer.v == 0.5).all()


@every_kernels
def test_kv_is_kept_in_the_caches_dtype(kernels):
    layer = pages(dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 3, 2)
    kernels.write_kv(layer, k, v, torch.tensor([6], dtype=torch.int32))
    assert torch.equal(layer.k[1, :, 2], k[0].bfloat16())
    assert torch.equal(layer.v[1, :, 2], v[0].bfloat16())


# Products ------------------------------------------------------------------------------------------------------------


@every_kernels
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 31, 64, BLOCKED_ROWS.stop - 1, BLOCKED_ROWS.stop])
@pytest.mark.parametrize("out", [96, 64, 61, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("features_first", [False, True])
def test_linear_is_a_product(kernels, num_tokens, out, biased, features_first):
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = torch.randn(num_tokens, 40, generator=generator), torch.randn(out, 40, generator=generator)
    bias = torch.randn(out, generator=generator) if biased else None
    if features_first:
        x = x.t().contiguous().t()
    given = [x.clone(), weight.clone()]
    made = kernels.linear(x, kernels.weight(weight), bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(made.double(), expected, rtol=0, atol=1e-4)
    assert made.dtype == torch.float32
    assert torch.equal(x, given[0])
    assert torch.equal(weight, given[1])


@every_kernels
def test_a_row_of_nan_stays_alone(kernels):
    x = torch.randn(8, 40)
    weight = kernels.weight(torch.randn(96, 40))
    clean = kernels.linear(x, weight)
    x[5] = torch.nan
    poisoned = kernels.linear(x, weight)
    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[5].isnan().all()


@every_kernels
def test_linear_in_half_precision(kernels):
    x, weight = torch.randn(8, 40).bfloat16(), torch.randn(96, 40).bfloat16()
    made = kernels.linear(x, kernels.weight(weight))
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), x.double() @ weight.double().T, rtol=2e-2, atol=5e-2)


# What lies between ---------------------------------------------------------------------------------------------------

WIDTHS = st.sampled_from([1, 5, 16, 33, 64])


@every_kernels
@given(rows=st.integers(0, 20), width=WIDTHS, features_first=st.booleans(), seed=st.integers(0, 99))
def test_norms(kernels, rows, width, features_first, seed):
    generator = torch.Generator().manual_seed(seed)
    x, more = torch.randn(2, rows, width, generator=generator) * 3
    weight = torch.randn(width, generator=generator)
    if features_first:
        x, more = x.t().contiguous().t(), more.t().contiguous().t()
    given = x.clone(), more.clone()
    normed, (total, normed_total) = kernels.rms_norm(x, weight, 1e-3), kernels.add_rms_norm(x, more, weight, 1e-3)
    assert torch.equal(total, x + more)
    for made, of in ((normed, x.double()), (normed_total, total.double())):
        expected = of / (of.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
        torch.testing.assert_close(made.double(), expected, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(now, was) for now, was in zip((x, more), given, strict=True))


@every_kernels
def test_a_norm_of_each_head_has_weights_for_each_head(kernels):
    x, weight = torch.randn(4, 3, 8), torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-3), expected)


@every_kernels
@given(rows=st.integers(0, 20), width=WIDTHS, scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]), seed=st.integers(0, 99))
def test_silu(kernels, rows, width, scale, seed):
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)) * scale
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(kernels.silu_mul(x).double(), expected, rtol=1e-6, atol=1e-6)


@every_kernels
def test_silu_of_extremes(kernels):
    x = torch.tensor([[-torch.inf, torch.inf, torch.nan, -88.0, -1e30, 0.0] + [1.0] * 6])
    made = kernels.silu_mul(x)[0].tolist()
    assert made[1] == torch.inf
    assert made[2] != made[2]
    assert abs(made[3]) < 1e-30
    assert abs(made[4]) < 1e-6
    assert made[5] == 0


@every_kernels
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 4),
    half=st.sampled_from([1, 3, 8, 16, 32]),
    features_first=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotation(kernels, tokens, heads, half, features_first, seed):
    generator = torch.Generator().manual_seed(seed)
    more = torch.randn(tokens, heads + 1, 2 * half, generator=generator)
    behind = more[:, heads].clone()
    x = more.permute(1, 2, 0).contiguous().permute(2, 0, 1)[:, :heads] if features_first else more[:, :heads]
    angles = torch.rand(tokens, 1, half, generator=generator) * 100
    first, second = x.double().chunk(2, dim=-1)
    cos, sin = angles.double().cos(), angles.double().sin()
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    made = kernels.rotate(x, torch.cat((angles.cos(), angles.cos()), dim=-1), angles.sin())
    torch.testing.assert_close(made.double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(more[:, heads], behind)


# Bits ----------------------------------------------------------------------------------------------------------------

in_c = pytest.mark.parametrize("kernels", list(kernel_sets())[1:])


@in_c
@given(
    rows=st.lists(ROW.filter(lambda row: row[1] > 0), min_size=1, max_size=6),
    chosen=st.integers(0, 5),
    block_sizes=st.tuples(st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 3, 4, 16])),
    heads=st.sampled_from([(1, 1), (9, 3), (8, 1)]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
@example([(300, 1), (0, 200), (5, 70)], 1, (16, 4), (9, 3), 2, 1)
def test_attention_gives_a_token_the_same_bits_in_any_batch(kernels, rows, chosen, block_sizes, heads, threads, seed):
    """A request of a batch against its last token alone, in pages of another size."""
    chosen %= len(rows)
    batch = make_batch(rows, block_sizes[0], heads, 64, seed=seed)
    together = with_threads(threads, lambda: kernels.attention(batch.q, batch.layer, batch.meta, batch.spec))
    end, length = int(batch.meta.host.query_start_loc[chosen + 1]), int(batch.meta.host.seq_lens[chosen])
    alone = make_batch([(length - 1, 1)], block_sizes[1], heads, 64, seed=seed)
    table, other = batch.meta.host.block_table[chosen], alone.meta.host.block_table[0]
    for position in range(length):
        (block, offset), (to, at) = (divmod(position, size) for size in block_sizes)
        for pages, source in ((alone.layer.k, batch.layer.k), (alone.layer.v, batch.layer.v)):
            pages[int(other[to]), :, at] = source[int(table[block]), :, offset]
    single = kernels.attention(batch.q[end - 1 : end], alone.layer, alone.meta, alone.spec)
    assert torch.equal(single[0], together[end - 1])


@in_c
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_gives_a_row_the_same_bits_in_any_batch(kernels, threads):
    x, weight = torch.randn(300, 77), kernels.weight(torch.randn(130, 77))
    together = with_threads(threads, lambda: kernels.linear(x, weight))
    for start, stop in ((0, 1), (5, 7), (17, 50), (100, 299)):
        assert torch.equal(kernels.linear(x[start:stop], weight), together[start:stop])


def with_threads(threads, function):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)
