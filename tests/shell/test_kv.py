"""The KV cache: one live handle a line, and clones that share nothing."""

import resource
import sys

import numpy as np
import pytest
import torch

from fstep.shell.cpu import CpuDevice
from fstep.shell.kv import new_kv
from fstep.state import ConfigError, DonatedError, Inputs, KVGroup, LayerSpec, Plan, i32

BLOCKS, BLOCK_SIZE = 6, 4
PLAN = Plan(100, 64, (KVGroup(BLOCKS, BLOCK_SIZE, (0, 2)), KVGroup(3, 2, (1,))))
SPECS = (LayerSpec(2, 8), LayerSpec(1, 4, group=1), LayerSpec(2, 8, dtype="bfloat16"))


@pytest.fixture
def kv():
    """A cache that holds NaN, so that what is copied and what isn't can be told apart."""
    made = new_kv(PLAN, SPECS, CpuDevice())
    for pages in all_pages(made):
        pages.fill_(torch.nan)
    return made


def all_pages(kv):
    return [pages for layer in kv.layers for pages in (layer.k, layer.v)]


def inputs(*slots):
    """A batch of which only the slots are looked at, one array a group."""
    some, none = i32([0]), np.zeros(0, np.bool_)
    return Inputs(some, some, some, some, some, some, tuple(map(i32, slots)), some, some, none)


def write(kv, block, value, group=0):
    for spec, layer in zip(SPECS, kv.layers, strict=True):
        if spec.group == group:
            layer.k[block], layer.v[block] = value, -value


def test_shapes_dtypes_and_bytes():
    kv = new_kv(PLAN, SPECS, CpuDevice())
    assert [tuple(pages.shape) for pages in all_pages(kv)] == [(6, 2, 4, 8)] * 2 + [(3, 1, 2, 4)] * 2 + [
        (6, 2, 4, 8)
    ] * 2
    assert [pages.dtype for pages in all_pages(kv)] == [torch.float32] * 4 + [torch.bfloat16] * 2
    assert all(pages.is_contiguous() and pages.data_ptr() % 64 == 0 for pages in all_pages(kv))
    assert kv.nbytes == 2 * (6 * 2 * 4 * 8 * 4 + 3 * 1 * 2 * 4 * 4 + 6 * 2 * 4 * 8 * 2)
    assert kv.nbytes == sum(
        spec.bytes_per_token() * PLAN.groups[spec.group].num_blocks * PLAN.groups[spec.group].block_size
        for spec in SPECS
    )
    assert (kv.line, kv.epoch, kv.origin, kv.written) == (0, 0, None, None)


def test_memory_is_not_touched_before_it_is_written():
    plan = Plan(100, 64, (KVGroup(1 << 17, 16, (0,)),))
    before = peak_bytes()
    kv = new_kv(plan, (LayerSpec(4, 64),), CpuDevice())
    assert kv.nbytes == 4 << 30
    kv.layers[0].k[7] = 1.0
    copy = kv.advance(1, inputs([7 * 16])).clone()
    assert (copy.layers[0].k[7] == 1).all()
    assert peak_bytes() - before < 64 << 20


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_a_layer_of_an_unknown_group():
    with pytest.raises(ConfigError, match=r"specs\[1\]\.group=2: the plan has 2 KV groups"):
        new_kv(PLAN, (LayerSpec(1, 1), LayerSpec(1, 1, group=2)), CpuDevice())


USES = {
    "line": lambda kv: kv.line,
    "epoch": lambda kv: kv.epoch,
    "origin": lambda kv: kv.origin,
    "written": lambda kv: kv.written,
    "layers": lambda kv: kv.layers,
    "nbytes": lambda kv: kv.nbytes,
    "clone": lambda kv: kv.clone(),
    "advance": lambda kv: kv.advance(2, inputs([4], [2])),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_dead_handle_says_what_to_do(kv, use):
    batch = inputs([4], [2])
    after = kv.advance(1, batch)
    with pytest.raises(DonatedError, match=r"line 0, epoch 0.*`state, kv = forward\(state, env, kv\)`"):
        use(kv)
    assert (after.line, after.epoch) == (0, 1)
    assert after.written is batch
    assert "donated" in repr(kv)
    assert "epoch 1, 1 of 6 blocks written, 1 of 3 blocks written" in repr(after)


def test_the_pages_go_from_handle_to_handle(kv):
    before = [pages.data_ptr() for pages in all_pages(kv)]
    assert [pages.data_ptr() for pages in all_pages(kv.advance(1, inputs([4], [2])))] == before


def test_the_newest_forward_may_be_repeated(kv):
    batch = inputs([4], [2])
    again = kv.advance(1, inputs([4], [2])).advance(1, batch)
    assert again.epoch == 1
    assert again.written is batch


def test_a_clone_and_its_source_never_change_each_other(kv):
    write(kv, 2, 5.0)
    kv = kv.advance(1, inputs([2 * BLOCK_SIZE], [2]))
    copy = kv.clone()
    assert (copy.line, copy.epoch, copy.origin, kv.origin) == (1, 1, (0, 1), None)
    assert copy.written is kv.written
    write(copy, 2, 7.0)
    assert (kv.layers[0].k[2] == 5).all()
    assert (kv.layers[2].v[2] == -5).all()
    write(kv, 2, 9.0)
    assert (copy.layers[0].k[2] == 7).all()
    assert (copy.layers[2].v[2] == -7).all()
    further = copy.advance(2, inputs([4], [2]))
    assert (kv.epoch, further.epoch) == (1, 2)
    assert "2 of 6" in repr(further)
    assert "1 of 6" in repr(kv)


class Marked(CpuDevice):
    """A device whose fresh memory can be told from what was copied."""

    def allocate(self, nbytes, align=64):
        return super().allocate(nbytes, align).fill_(0x42)


def test_a_clone_copies_the_blocks_that_were_ever_written_and_no_others():
    kv = new_kv(PLAN, SPECS, Marked())
    for block in range(BLOCKS):
        write(kv, block, 1.0 + block)
    write(kv, 1, 3.0, group=1)
    kv = kv.advance(1, inputs([4, 5, 23, -1], [2])).advance(2, inputs([-1, 9], []))
    copy = kv.clone()
    for source, target in zip(all_pages(kv), all_pages(copy), strict=True):
        written = [1] if len(source) == 3 else [1, 2, 5]
        others = [block for block in range(len(source)) if block not in written]
        assert torch.equal(source[written], target[written])
        assert (target[others].view(torch.uint8) == 0x42).all()
    kv = kv.advance(3, inputs([0], [0]))
    assert "4 of 6" in repr(kv)
    assert "3 of 6" in repr(copy)


def test_line_numbers_are_the_caches_own(kv):
    first, second = kv.clone(), kv.clone()
    third = first.clone()
    assert [each.line for each in (kv, first, second, third)] == [0, 1, 2, 3]
    assert third.origin == (1, 0)
    assert new_kv(PLAN, SPECS, CpuDevice()).line == 0


def test_a_clone_forgets_its_origin_when_it_goes_on(kv):
    copy = kv.advance(1, inputs([4], [2])).clone()
    repeated = copy.advance(1, inputs([4], [2]))
    assert repeated.origin == (0, 1)
    assert repeated.advance(2, inputs([5], [3])).origin is None
