"""Rotary positions against published figures, a rotation written with complex numbers, and transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fstep.models.rope import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Rotation,
    YarnScaling,
    yarn_attention_factor,
)
from fstep.shell.torch_kernels import TorchKernels
from fstep.state import CheckpointError

PLAIN = (1, 0.316228, 0.1, 0.031623, 0.01, 0.003162, 0.001, 0.000316)


def test_llama3_frequencies() -> None:
    """C120."""
    scaled = Rope(10000.0, Llama3Scaling(8.0, 1.0, 4.0, 64)).inv_freq(16)
    assert scaled.tolist() == pytest.approx(
        [1, 0.244385, 0.013042, 0.003953, 0.00125, 0.000395, 0.000125, 0.00004], abs=1e-6
    )
    assert Rope(10000.0).inv_freq(16).tolist() == pytest.approx(PLAIN, abs=1e-6)


def test_linear_and_factors_divide() -> None:
    assert Rope(10000.0, LinearScaling(4.0)).inv_freq(16).tolist() == pytest.approx([f / 4 for f in PLAIN], abs=1e-6)
    factors = (1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
    expected = [f / by for f, by in zip(PLAIN, factors, strict=True)]
    assert Rope(10000.0, FrequencyFactors(factors)).inv_freq(16).tolist() == pytest.approx(expected, abs=1e-6)


def test_llama3_as_factors_is_the_same() -> None:
    plain, scaled = Rope(500000.0), Rope(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    factors = FrequencyFactors(tuple((plain.inv_freq(64) / scaled.inv_freq(64)).tolist()))
    assert torch.allclose(Rope(500000.0, factors).inv_freq(64), scaled.inv_freq(64), rtol=1e-6)


YARN: list[dict[str, Any]] = [
    {"factor": 4.0, "original_max_position_embeddings": 32768},
    {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.1},
    {"factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 4, "beta_slow": 0.5, "truncate": False},
    {"factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    {"factor": 2.0, "original_max_position_embeddings": 4},  # the ramp has no width
]


@pytest.mark.parametrize("fields", YARN)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_yarn_equals_transformers(fields: dict[str, Any], head_dim: int, transformers: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=int(fields["factor"] * fields["original_max_position_embeddings"]),
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **fields},
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    inferred = yarn_attention_factor(fields["factor"], fields.get("mscale", 0.0), fields.get("mscale_all_dim", 0.0))
    scaling = YarnScaling(
        fields["factor"],
        fields["original_max_position_embeddings"],
        fields.get("attention_factor", inferred),
        fields.get("beta_fast", 32.0),
        fields.get("beta_slow", 1.0),
        fields.get("truncate", True),
    )
    rope = Rope(10000.0, scaling)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert torch.allclose(rope.inv_freq(head_dim), expected, rtol=1e-5, atol=0)


def turn(heads: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    rotation = Rotation.at(positions, inv_freq, factor, torch.float32)
    return TorchKernels().rotate(heads, rotation.cos, rotation.sin)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rotation_is_a_complex_product(transposed: bool) -> None:
    torch.manual_seed(0)
    heads, inv_freq = torch.randn(5, 3, 8), Rope(100.0).inv_freq(8)
    if transposed:
        heads = heads.reshape(5, 24).T.contiguous().T.view(5, 3, 8)
    positions = torch.tensor([0, 1, 7, 100, 3], dtype=torch.int32)
    before = heads.clone()
    turned = turn(heads, positions, inv_freq, 1.5)
    angles = positions.double()[:, None, None] * inv_freq.double()
    pairs = torch.complex(heads[..., :4].double(), heads[..., 4:].double()) * torch.polar(
        torch.tensor(1.5).double(), angles
    )
    assert torch.allclose(turned.double(), torch.cat((pairs.real, pairs.imag), -1), atol=1e-5)
    assert torch.equal(heads, before)


def test_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k, inv_freq = torch.randn(1, 1, 8), torch.randn(1, 1, 8), Rope().inv_freq(8)

    def score(at: int, to: int) -> float:
        turned = [turn(x, torch.tensor([p]), inv_freq) for p, x in ((at, q), (to, k))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Rope(1.0), "rope_theta=1.0"),
        (lambda: Rope(math.nan), "rope_theta=nan"),
        (lambda: Rope(math.inf), "rope_theta=inf"),
        (lambda: LinearScaling(0.0), "factor=0.0"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 64), "high_freq_factor=4.0: must be above low_freq_factor=4.0"),
        (lambda: Llama3Scaling(-8.0, 1.0, 4.0, 64), "factor=-8.0"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "original_max_position_embeddings=0"),
        (lambda: YarnScaling(4.0, 64, 1.0, beta_fast=0.5), "beta_fast=0.5: must be at least beta_slow=1.0"),
        (lambda: YarnScaling(4.0, 64, 1.0, beta_slow=0.0), "beta_slow=0.0"),
        (lambda: YarnScaling(4.0, -1, 1.0), "original_max_position_embeddings=-1"),
        (lambda: FrequencyFactors((1.0, 0.0)), "must all be above 0"),
        (lambda: Rope(10.0, FrequencyFactors((1.0,))).inv_freq(4), "must be head_dim / 2 = 2 numbers"),
    ],
)
def test_what_is_out_of_range_is_named(make: Any, names: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        make()
    assert names in str(caught.value)
