"""Rotary position embeddings (RoFormer, Su et al. 2021), and the ways to stretch them over longer texts.

Query and key heads are rotated in pairs `(i, i + head_dim / 2)`, the order of Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from fstep.state import CheckpointError


class RopeScaling(Protocol):
    """A change of the rotation's frequencies."""

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied with."""
        ...

    def scale(self, inv_freq: Tensor, theta: float) -> Tensor:
        """The changed frequencies of `inv_freq [head_dim / 2]`, radians a token: the same shape."""
        ...


@frozen
class LinearScaling:
    """Positions divided by `factor` (position interpolation, Chen et al. 2023)."""

    factor: float
    attention_factor: float = field(default=1.0, init=False)

    def __attrs_post_init__(self) -> None:
        _check("factor", self.factor, self.factor > 0, "must be above 0")

    def scale(self, inv_freq: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        return inv_freq / self.factor


@frozen
class Llama3Scaling:
    """Llama 3.1: slow frequencies divided by `factor`, fast ones kept, and a ramp over their turns in between."""

    factor: float
    low_freq_factor: float  #: turns in the original context up to which a frequency is divided
    high_freq_factor: float  #: turns from which it is kept
    original_max_position_embeddings: int
    attention_factor: float = field(default=1.0, init=False)

    def __attrs_post_init__(self) -> None:
        _check("factor", self.factor, self.factor > 0, "must be above 0")
        limit = f"must be above low_freq_factor={self.low_freq_factor}"
        _check("high_freq_factor", self.high_freq_factor, self.high_freq_factor > self.low_freq_factor, limit)
        _check_original(self.original_max_position_embeddings)

    def scale(self, inv_freq: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        turns = self.original_max_position_embeddings / (2 * math.pi) * inv_freq
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return inv_freq * (kept + (1 - kept) / self.factor)


@frozen
class YarnScaling:
    """YaRN (Peng et al. 2023): as in Llama 3, but with the ramp over the dimensions, and sharper attention."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0  #: turns in the original context from which a frequency is kept
    beta_slow: float = 1.0  #: turns up to which it is divided by `factor`
    truncate: bool = True  #: the ramp begins and ends at whole dimensions

    def __attrs_post_init__(self) -> None:
        _check("factor", self.factor, self.factor > 0, "must be above 0")
        _check("beta_slow", self.beta_slow, self.beta_slow > 0, "must be above 0")
        limit = f"must be at least beta_slow={self.beta_slow}"
        _check("beta_fast", self.beta_fast, self.beta_fast >= self.beta_slow, limit)
        _check_original(self.original_max_position_embeddings)

    def scale(self, inv_freq: Tensor, theta: float) -> Tensor:
        low, high = self._ramp(2 * len(inv_freq), theta)
        index = torch.arange(len(inv_freq), dtype=inv_freq.dtype)
        divided = ((index - low) / (high - low)).clamp(0, 1)
        return inv_freq * (1 - divided) + inv_freq / self.factor * divided

    def _ramp(self, head_dim: int, theta: float) -> tuple[float, float]:
        """The dimensions at which the ramp begins and ends."""
        low, high = (self._dimension(turns, head_dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001

    def _dimension(self, turns: float, head_dim: int, theta: float) -> float:
        """The dimension that turns so often in the original context."""
        period = self.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(period) / (2 * math.log(theta))


@frozen
class FrequencyFactors:
    """Each frequency divided by a number of its own: how GGUF files store Llama 3's scaling."""

    factors: tuple[float, ...]  #: [head_dim / 2]
    attention_factor: float = field(default=1.0, init=False)

    def __attrs_post_init__(self) -> None:
        _check("rope factors", self.factors, all(each > 0 for each in self.factors), "must all be above 0")

    def scale(self, inv_freq: Tensor, theta: float) -> Tensor:  # noqa: ARG002
        limit = f"must be head_dim / 2 = {len(inv_freq)} numbers"
        _check("rope factors", self.factors, len(self.factors) == len(inv_freq), limit)
        return inv_freq / torch.tensor(self.factors, dtype=inv_freq.dtype)


@frozen
class Rope:
    """The rotation of a model: base `theta`, and how it is scaled, if it is."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __attrs_post_init__(self) -> None:
        _check("rope_theta", self.theta, 1 < self.theta < math.inf, "must be a finite number above 1")

    @property
    def attention_factor(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def inv_freq(self, head_dim: int) -> Tensor:
        """Radians a token of each pair of dimensions: `[head_dim / 2]` float32."""
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        plain = 1.0 / torch.pow(self.theta, exponent)
        return plain if self.scaling is None else self.scaling.scale(plain, self.theta)


@frozen(eq=False)
class Rotation:
    """Cosine and sine of a batch's angles, worked out once a step for all layers."""

    cos: Tensor  #: [Tp, 1, head_dim], both halves alike
    sin: Tensor  #: [Tp, 1, head_dim / 2]

    @classmethod
    def at(cls, positions: Tensor, inv_freq: Tensor, attention_factor: float, dtype: torch.dtype) -> Rotation:
        """The rotation at `positions [Tp]`; the angles are float32 whatever `dtype` the result has."""
        angles = positions.to(torch.float32)[:, None, None] * inv_freq
        cos, sin = angles.cos().mul_(attention_factor), angles.sin().mul_(attention_factor)
        return cls(torch.cat((cos, cos), dim=-1).to(dtype), sin.to(dtype))


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """How much YaRN sharpens attention for a stretch of `factor`, if the checkpoint doesn't say it outright."""
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _check_original(value: int) -> None:
    _check("original_max_position_embeddings", value, value > 0, "must be above 0")


def _check(name: str, value: object, holds: bool, limit: str) -> None:
    if not holds:
        raise CheckpointError(f"{name}={value!r}: {limit}")
