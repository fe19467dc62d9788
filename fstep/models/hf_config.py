"""A Hugging Face config.json as a `DenseConfig`.

Where config.json leaves a field out, the default is that of the architecture in transformers. Sliding-window attention
isn't built: a model that uses it is limited to requests of `sliding_window` tokens (`DenseConfig.max_model_len`), among
which the window hides nothing, so that the results are exact.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from attrs import frozen

from fstep.models.dense import DenseConfig
from fstep.models.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling, yarn_attention_factor
from fstep.state import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ORIGINAL = "original_max_position_embeddings"
_SLIDING, _FULL = "sliding_attention", "full_attention"


@frozen(eq=False)
class Fields:
    """An object of a JSON file. Fields are asked for by type; null counts as missing.

    Raises `CheckpointError` naming the file, the field, its value and the limit.
    """

    source: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> Fields:
        try:
            values = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: must hold a JSON object, not {type(values).__name__}")
        return cls(str(path), cast("dict[str, object]", values))

    def error(self, name: str, limit: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {name}={self.values.get(name)!r}: {limit}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be an integer of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(name, "must be a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._given(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def items(self, name: str) -> list[object]:
        value = self._given(name, [])
        if not isinstance(value, list):
            raise self.error(name, "must be a list")
        return cast("list[object]", value)

    def object(self, name: str) -> Fields:
        value = self._given(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(f"{self.source}: {name}", cast("dict[str, object]", value))

    def _given(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return default if value is None else value


@frozen
class _Architecture:
    """What config.json leaves unsaid about a family, and which of its fields the family heeds."""

    model_type: str
    name: str
    max_position_embeddings: int
    num_key_value_heads: int | None = None  #: None: as many as there are query heads
    qkv_bias: bool = False  #: always, whatever the file says
    heeds_attention_bias: bool = False
    heeds_mlp_bias: bool = False
    qk_norm: bool = False
    windowed_layers: bool = False  #: only some layers have a sliding window, if use_sliding_window is set
    windowed: bool = False  #: all have, unless sliding_window is null


_ARCHITECTURES = (
    _Architecture("llama", "LlamaForCausalLM", 2048, heeds_attention_bias=True, heeds_mlp_bias=True),
    _Architecture("mistral", "MistralForCausalLM", 131072, num_key_value_heads=8, windowed=True),
    _Architecture("qwen2", "Qwen2ForCausalLM", 32768, num_key_value_heads=32, qkv_bias=True, windowed_layers=True),
    _Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        32768,
        num_key_value_heads=32,
        heeds_attention_bias=True,
        qk_norm=True,
        windowed_layers=True,
    ),
)
_WINDOW = 4096  # of every windowed family, where the file doesn't say


def dense_config(fields: Fields, dtype: str = "float32") -> DenseConfig:
    """The configuration that a config.json describes.

    Raises `CheckpointError` for an unknown architecture (naming those that work), an unknown rope_type, weights
    quantised in place, and any field that is missing or out of its range.
    """
    try:
        return _dense_config(fields, _architecture(fields), dtype)
    except CheckpointError as error:
        raise located(error, fields.source) from None


def _dense_config(fields: Fields, family: _Architecture, dtype: str) -> DenseConfig:
    _refuse_unbuilt(fields)
    positions = fields.integer("max_position_embeddings", family.max_position_embeddings)
    rope = rope_of(fields, positions)
    window = _sliding_window(fields, family)
    attention_bias = family.heeds_attention_bias and fields.flag("attention_bias", False)
    heads = fields.integer("num_attention_heads")
    return DenseConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer("num_key_value_heads", family.num_key_value_heads or heads),
        head_dim=_head_dim(fields, heads),
        max_model_len=min(stretched(rope, positions), window or sys.maxsize),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.heeds_mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=dtype,
    )


def located(error: CheckpointError, source: str) -> CheckpointError:
    """The error with the name of its source in front, if it isn't there yet."""
    text = str(error)
    return error if text.startswith(source) else CheckpointError(f"{source}: {text}")


def _head_dim(fields: Fields, heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if not fields.has("head_dim") and hidden_size % heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads={heads}, for want of head_dim")
    return fields.integer("head_dim", hidden_size // heads)


def _architecture(fields: Fields) -> _Architecture:
    """The family that `model_type` and `architectures` name; either may be missing, but they may not disagree."""
    named = [name for name in (*fields.items("architectures"), fields.text("model_type", "")) if name]
    found = [
        family for family in _ARCHITECTURES if named and all(name in (family.name, family.model_type) for name in named)
    ]
    if not found:
        works = ", ".join(f"{family.name} ({family.model_type})" for family in _ARCHITECTURES)
        raise CheckpointError(
            f"{fields.source}: unknown architecture: architectures={fields.values.get('architectures')!r}, "
            f"model_type={fields.values.get('model_type')!r}; those that work are {works}"
        )
    return found[0]


def _refuse_unbuilt(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", "only silu is built")
    if fields.has("quantization_config"):
        raise fields.error("quantization_config", "quantised weights can't be read from a safetensors file")


def _sliding_window(fields: Fields, family: _Architecture) -> int | None:
    """Tokens that the narrowest layer sees, None if they all see everything."""
    if family.windowed_layers:
        if not fields.flag("use_sliding_window", False) or not _has_windowed_layers(fields):
            return None
    elif not family.windowed:
        return None
    if "sliding_window" in fields.values and not fields.has("sliding_window"):
        return None
    return fields.integer("sliding_window", _WINDOW)


def _has_windowed_layers(fields: Fields) -> bool:
    layer_types = fields.items("layer_types")
    unknown = [kind for kind in layer_types if kind not in (_SLIDING, _FULL)]
    if unknown:
        raise fields.error("layer_types", f"{unknown[0]!r} isn't built; {_FULL} and {_SLIDING} are")
    if layer_types:
        return _SLIDING in layer_types
    return fields.integer("max_window_layers", 28, least=0) < fields.integer("num_hidden_layers")


def rope_of(fields: Fields, max_position_embeddings: int) -> Rope:
    """The rotation: from `rope_scaling` or, as newer files have it, `rope_parameters` with rope_theta inside.

    Raises `CheckpointError` naming the known types for an unknown one.
    """
    own = fields.object("rope_scaling")
    own = own if own.values else fields.object("rope_parameters")
    for level in (fields, own):
        if level.number("partial_rotary_factor", 1.0) != 1.0:
            raise level.error("partial_rotary_factor", "only 1.0 is built: heads are rotated as a whole")
    original = fields.integer(_ORIGINAL, own.integer(_ORIGINAL, max_position_embeddings))
    theta = own.number("rope_theta", fields.number("rope_theta", 10000.0))
    try:
        return Rope(theta, _scaling(own, original, max_position_embeddings))
    except CheckpointError as error:
        raise located(error, own.source) from None


def stretched(rope: Rope, max_position_embeddings: int) -> int:
    """The positions that a model reaches when its rotation is scaled.

    Linear scaling multiplies those of the file; YaRN those of the pretraining, unless the file's are more already.
    """
    match rope.scaling:
        case LinearScaling(factor=factor):
            return max(max_position_embeddings, int(max_position_embeddings * factor))
        case YarnScaling(factor=factor, original_max_position_embeddings=original):
            return max(max_position_embeddings, int(original * factor))
        case _:
            return max_position_embeddings


def _scaling(own: Fields, original: int, max_position_embeddings: int) -> RopeScaling | None:
    match _rope_type(own):
        case "default":
            return None
        case "linear":
            return LinearScaling(own.number("factor"))
        case "llama3":
            low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
            return Llama3Scaling(own.number("factor"), low, high, original)
        case _:
            return _yarn(own, original, max_position_embeddings)


def _yarn(own: Fields, original: int, max_position_embeddings: int) -> YarnScaling:
    factor = own.number("factor", max_position_embeddings / original)
    inferred = yarn_attention_factor(factor, own.number("mscale", 0.0), own.number("mscale_all_dim", 0.0))
    return YarnScaling(
        factor,
        original,
        own.number("attention_factor", inferred),
        own.number("beta_fast", 32.0) or 32.0,
        own.number("beta_slow", 1.0) or 1.0,
        own.flag("truncate", True),
    )


def _rope_type(own: Fields) -> str:
    rope_type = own.text("rope_type", own.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{own.source}: rope_type={rope_type!r}: must be one of {', '.join(ROPE_TYPES)}")
    nested = [name for name, value in own.values.items() if isinstance(value, dict)]
    if nested:
        raise own.error(nested[0], "a rotation of its own for some layers isn't built")
    if "factor" in own.values and not own.has("rope_type") and not own.has("type"):
        raise own.error(
            "rope_type", f"is missing beside factor={own.values['factor']!r}; one of {', '.join(ROPE_TYPES)}"
        )
    return rope_type
