"""Faults of sampling."""

import math

import pytest
import torch

from fstep.state import SampleError, SamplingParams
from tests.ops.test_sample import draw
from tests.peers.adapters import scores

HOT = SamplingParams(temperature=1, seed=0)


@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_c042_ties_at_the_top_k_border_all_stay(size):
    """The rule: all ids equal to the k-th stay, in every batch."""
    row = [math.log(p) for p in (0.5, 0.2, 0.2, 0.1)]
    probs = scores([row] * size, [SamplingParams(top_k=2)] * size).softmax(-1)
    assert torch.allclose(probs, torch.tensor([[5 / 9, 2 / 9, 2 / 9, 0]] * size))
    assert scores([[1.0] * 4] * size, [SamplingParams(top_k=1)] * size).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-38])
def test_c044_a_tiny_temperature_is_no_overflow(dtype, temperature):
    logits = torch.tensor([[3.5, 2.25, 10.5, -1.75]] * 10, dtype=dtype)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(10)]
    assert draw(logits, params) == ([2] * 10, [SampleError.NONE] * 10)
    if not params[0].greedy:
        logprobs = scores(logits.tolist(), params).log_softmax(-1)
        assert (logprobs[:, 2] == 0).all()
        assert not logprobs.isnan().any()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), HOT], ids=["greedy", "hot"])
def test_c046_rows_without_a_distribution_fail_alone(params):
    nan, inf = float("nan"), float("inf")
    healthy = [0.0, 3.0, 1.0, 2.0, -1.0]
    rows = [[nan] * 5, [nan, 1.0, 2.0, 3.0, 4.0], [-inf] * 5, [0.0, inf, 0.0, 0.0, 0.0]]
    token_ids, errors = draw([*rows, healthy], [params] * 5)
    assert errors == [SampleError.NO_DISTRIBUTION] * 4 + [SampleError.NONE]
    assert token_ids[:4] == [-1] * 4
    assert token_ids[4:] == draw([healthy], [params])[0]


@pytest.mark.parametrize("vocab_size", [8193, 10000])
def test_c047_a_vocabulary_that_is_no_multiple_of_a_tile(vocab_size):
    """Nothing is drawn from behind the end: all is on the first id, or spread over the last ones."""
    first = torch.full((100, vocab_size), -torch.inf)
    first[:, 0] = 0
    params = [SamplingParams(temperature=1, seed=seed) for seed in range(100)]
    assert draw(first, params)[0] == [0] * 100
    last = torch.full((100, vocab_size), -torch.inf)
    last[:, -3:] = -1e4
    drawn = set(draw(last, params)[0])
    assert drawn == {vocab_size - 3, vocab_size - 2, vocab_size - 1}
