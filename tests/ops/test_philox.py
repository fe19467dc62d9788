"""The published test vectors of Philox-4x32-10, in NumPy and in torch, and the noise made of it."""

import math

import numpy as np
import pytest
import torch

from fstep.ops.philox import HIGHEST_GUMBEL, LOWEST_GUMBEL, UNIFORM_BITS, philox4x32, uniform

# Salmon et al., Random123, known-answer vectors: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_known_answers(counter, key, words, make):
    got = philox4x32(tuple(make([word]) for word in counter), tuple(make([word]) for word in key))
    assert tuple(int(each[0]) for each in got) == words


def test_numpy_and_torch_agree_on_random_counters():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (6, 1000))
    ours = philox4x32(tuple(words[:4]), tuple(words[4:]))
    theirs = philox4x32(tuple(map(torch.from_numpy, words[:4])), tuple(map(torch.from_numpy, words[4:])))
    assert all((a == b.numpy()).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("upper", [0, 2**UNIFORM_BITS - 1])
def test_the_noise_stays_within_its_bounds(upper):
    u = uniform(np.float64(upper))
    assert 0 < u < 1
    assert LOWEST_GUMBEL < -math.log(-math.log(u)) < HIGHEST_GUMBEL
