"""The CPU as a device."""

import numpy as np
import pytest
import torch

from fstep.shell.cpu import CpuDevice
from fstep.state import DeviceError, frozen_array, i32


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
