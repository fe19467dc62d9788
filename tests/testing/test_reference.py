"""The reference against facts that don't come from us: published numbers, and rules small enough to count by hand."""

import math

import numpy as np
import pytest

from fstep.state import FinishReason, SamplingParams
from fstep.testing import HashModel, reference_token, reference_tokens
from fstep.testing.reference import gumbel, philox, reference_kept

ONES = 2**32 - 1


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, words):
    """The known answers of philox4x32-10 that its authors published with Random123."""
    assert philox(counter, key) == words


def test_gumbel_noise_has_its_mean_and_spread():
    """20,000 draws: the mean lies within 0.06 of Euler's constant but for a chance of 1e-10 (it deviates by 0.009)."""
    noise = np.array([gumbel(7, position, token) for position in range(200) for token in range(100)])
    assert abs(noise.mean() - 0.5772) < 0.06
    assert abs(noise.std() - math.pi / math.sqrt(6)) < 0.06
    assert len(np.unique(noise)) > 19_900


def test_noise_depends_on_all_that_it_is_keyed_by():
    noise = {gumbel(*key) for key in ((1, 5, 9), (2, 5, 9), (1 + 2**32, 5, 9), (1, 6, 9), (1, 5, 8), (1, 5, 13))}
    noise |= {gumbel(1, 5, 9, stream=1), gumbel(1, 5, 9, sample_index=1)}
    assert len(noise) == 8


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05], np.float32))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.8}, {1, 2, 3}),
        ({"min_p": 0.3}, {1, 2, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),
        ({"temperature": 0.25, "top_p": 0.8}, {1}),
        ({"temperature": 2.0, "min_p": 0.45}, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_filters_by_hand(params, kept):
    assert set(reference_kept(LOGITS, SamplingParams(**params))) == kept


def test_top_k_keeps_ties():
    assert set(reference_kept(np.array([1, 2, 2, 0], np.float32), SamplingParams(top_k=1))) == {1, 2}


def test_greedy_takes_the_lowest_of_equals():
    assert reference_token(np.array([1, 3, 3], np.float32), SamplingParams(temperature=0), 4) == 1


def test_tokens_are_drawn_as_often_as_they_are_probable():
    """4,000 draws: a share lies within 0.05 of its probability but for a chance of 1e-9 (it deviates by 0.008)."""
    drawn = [reference_token(LOGITS, SamplingParams(seed=3), position) for position in range(4000)]
    shares = np.bincount(drawn, minlength=5) / 4000
    assert np.abs(shares - np.exp(LOGITS)).max() < 0.05


def next_id(ids):
    """A model that says n + 1 after n, of 10 ids."""
    return np.eye(10, dtype=np.float32)[(ids[-1] + 1) % 10]


GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.mark.parametrize(
    ("params", "eos", "max_model_len", "tokens", "reason"),
    [
        ({}, (), 20, (3, 4, 5, 6, 7, 8), FinishReason.LENGTH),
        ({"max_tokens": 1}, (), 20, (3,), FinishReason.LENGTH),
        ({"max_tokens": None}, (), 6, (3, 4, 5, 6), FinishReason.LENGTH),
        ({}, (5,), 20, (3, 4, 5), FinishReason.STOP),
        ({"ignore_eos": True}, (5,), 20, (3, 4, 5, 6, 7, 8), FinishReason.LENGTH),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, (5,), 20, (3, 4, 5, 6, 7), FinishReason.STOP),
        ({"max_tokens": 3}, (5,), 20, (3, 4, 5), FinishReason.STOP),
    ],
    ids=str,
)
def test_ends_by_hand(params, eos, max_model_len, tokens, reason):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, **params})
    assert reference_tokens(next_id, (1, 2), params, eos, max_model_len) == (tokens, reason)


@pytest.mark.parametrize("length", [0, 4, 5])
def test_a_prompt_without_room_is_refused(length):
    with pytest.raises(ValueError, match=f"a prompt of {length} tokens: must have 1 to 3"):
        reference_tokens(next_id, (1,) * length, GREEDY, (), 4)


def test_it_is_short():
    """An oracle that can be read in one go."""
    import inspect

    from fstep.testing import reference

    assert len(inspect.getsource(reference).splitlines()) < 150


def test_two_seeds_give_different_tokens_and_one_seed_the_same():
    logits = HashModel(50, 64).reference_logits
    params = [SamplingParams(seed=seed, max_tokens=20) for seed in (1, 2, 1)]
    first, second, again = (reference_tokens(logits, (5,), each, (), 64)[0] for each in params)
    assert first == again != second
