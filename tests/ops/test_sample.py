"""`sample`: filters against a plain reference, noise that belongs to (seed, position, id), rows that can't be drawn."""

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from fstep import ops
from fstep.ops._sample import _min_p, _top_k, _top_p
from fstep.shell import CpuDevice
from fstep.state import Env, Output, SampleError, SamplingParams
from tests.ops.conftest import Batch, new


def draw(logits, params, positions=None):
    """The ids and error codes of a batch with these logits `[B, V]` and one set of parameters a row."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    size = len(logits)
    lengths = positions or [3] * size
    batch = Batch(num_blocks=4 * size + 1, vocab_size=logits.shape[1], block_size=16)
    names = [f"r{row}" for row in range(size)]
    admitted = tuple(
        new(name, length, evolve(each, seed=each.seed or 0))
        for name, length, each in zip(names, lengths, params, strict=True)
    )
    blocks = {name: range(4 * row + 1, 4 * row + 5) for row, name in enumerate(names)}
    batch.prepare(dict(zip(names, lengths, strict=True)), blocks, new=admitted)
    step = evolve(batch.state.step, output=Output(logits))
    sampled = ops.sample(batch.state.with_step(step), Env(None, {}, CpuDevice())).step.sampled
    return sampled.token_ids[:, 0].tolist(), sampled.error.tolist()


def kept(scores):
    return [row.isfinite().nonzero()[:, 0].tolist() for row in scores]


def test_top_k_keeps_all_ties_whatever_the_batch():
    for size in (1, 7, 8, 9):
        scores = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log().expand(size, 4)
        assert kept(_top_k(scores, torch.full((size,), 2), 2)) == [[0, 1, 2]] * size
        assert kept(_top_k(torch.ones(size, 4), torch.ones(size, dtype=torch.int64), 1)) == [[0, 1, 2, 3]] * size


@given(
    st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=20),
    st.floats(0.01, 1),
    st.integers(0, 20),
    st.floats(0, 1),
)
def test_filters_keep_what_the_definition_says(logits, top_p, top_k, min_p):
    scores = torch.tensor([logits]) - max(logits)
    by_score = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    probabilities = np.exp([logits[i] - max(logits) for i in by_score])

    reach = np.cumsum(probabilities / probabilities.sum())
    if np.abs(reach - top_p).min() > 1e-5:
        count = 1 + int((reach < top_p).sum()) if top_p < 1 else len(logits)
        assert kept(_top_p(scores, torch.tensor([top_p]))) == [sorted(by_score[:count])]
    if top_k:
        border = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        expected = [i for i, logit in enumerate(logits) if logit >= border]
        clipped = torch.tensor([min(top_k, len(logits))])
        assert kept(_top_k(scores, clipped, int(clipped))) == [expected]
    if np.abs(probabilities - min_p).min() > 1e-5:
        expected = sorted(i for i, p in zip(by_score, probabilities, strict=True) if p >= min_p)
        assert kept(_min_p(scores, torch.tensor([min_p]))) == [expected]


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 seeds with 4 degrees of freedom: by chance above 40 once in 2 × 10^7."""
    logits, seeds = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 20_000
    ids, _ = draw(logits.expand(seeds, 5), [SamplingParams(seed=seed) for seed in range(seeds)])
    expected = seeds * logits.double().softmax(-1).numpy()
    seen = np.bincount(ids, minlength=5)
    assert ((seen - expected) ** 2 / expected).sum() < 40


def test_the_noise_belongs_to_seed_and_position_not_to_the_batch():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 97)).astype(np.float32)
    params = [SamplingParams(seed=seed, temperature=2) for seed in (1, 2, 1, 2**63, 5, 6)]
    positions = [3, 3, 4, 5, 6, 7]
    together, _ = draw(logits, params, positions)
    for row in range(6):
        assert draw(logits[row : row + 1], [params[row]], [positions[row]])[0] == [together[row]]
    other_seed, _ = draw(logits, [evolve(each, seed=each.seed + 100) for each in params], positions)
    assert other_seed != together


def test_ids_that_cant_win_never_do_and_change_nothing():
    logits = torch.zeros(200, 8)
    logits[:, 4:] = -30.0
    params = [SamplingParams(seed=seed) for seed in range(200)]
    ids, _ = draw(logits, params)
    assert max(ids) < 4
    assert draw(logits[:, :4], params)[0] == ids


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38])
def test_tiny_temperatures_take_the_best(temperature):
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(10)]
    assert draw([[3.5, 2.25, 10.5, -1.75]] * 10, params) == ([2] * 10, [0] * 10)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "row",
    [[math.nan] * 5, [math.nan, 1, 2, 3, 4], [-math.inf] * 5, [0, math.inf, 1, 2, 3]],
    ids=["all NaN", "one NaN", "all -inf", "one +inf"],
)
def test_a_row_without_a_distribution_fails_alone(row, temperature):
    params = SamplingParams(temperature=temperature, seed=3)
    healthy = [0.0, 1.0, 2.0, 3.0, 4.0]
    ids, errors = draw([row, healthy], [params, params])
    assert errors == [SampleError.NO_DISTRIBUTION, SampleError.NONE]
    assert ids == [-1, draw([healthy], [params])[0][0]]


def test_minus_infinity_is_never_drawn():
    logits = [[-math.inf, 0.0, -math.inf, 0.0]] * 50
    ids, errors = draw(logits, [SamplingParams(seed=seed, temperature=100) for seed in range(50)])
    assert set(ids) == {1, 3}
    assert set(errors) == {SampleError.NONE}


def test_equal_scores_go_to_the_lowest_id():
    assert draw([[1.0, 3.0, 3.0, 3.0]], [SamplingParams(temperature=0)])[0] == [1]


def test_greedy_and_random_rows_side_by_side():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4, 50)).astype(np.float32)
    mixed = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=3, seed=1),
        SamplingParams(temperature=3, seed=1, top_k=5),
        SamplingParams(temperature=3, seed=1, top_p=0.5, min_p=0.1),
    ]
    ids, _ = draw(logits, mixed)
    assert ids == [draw(logits[row : row + 1], [mixed[row]])[0][0] for row in range(4)]
    assert ids[0] == logits[0].argmax()
