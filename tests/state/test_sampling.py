"""Every parameter has its range, and its error names the field, the value and the limit."""

import math

import numpy as np
import pytest

from fstep.state import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("stop", ""),
        ("stop", [1]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
    ],
)
def test_a_value_out_of_range_is_named(field, value):
    with pytest.raises(RequestError, match=rf"{field}=.*: must ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.request_id is None


def test_values_are_made_plain():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=-1,
        stop="end",
        stop_token_ids=np.array([3, 4]),
        max_tokens=None,
        seed=2**64 - 1,
    )
    assert params == SamplingParams(0.5, stop=("end",), stop_token_ids=(3, 4), max_tokens=None, seed=2**64 - 1)
    assert hash(params) == hash(params)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1, False)])
def test_greedy_as_in_vllm(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
