"""config.json: defaults as transformers has them, old and new forms, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fstep.models.dense import DenseConfig
from fstep.models.hf_config import Fields, dense_config
from fstep.models.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling
from fstep.state import CheckpointError
from tests.models.conftest import TINY


def config_of(model_type: str = "llama", /, **fields: Any) -> DenseConfig:
    """The configuration of a tiny config.json with some fields changed; `...` takes a field out."""
    values = {name: value for name, value in {"model_type": model_type, **TINY, **fields}.items() if value is not ...}
    return dense_config(Fields("config.json", values))


def refusal(model_type: str = "llama", /, **fields: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        config_of(model_type, **fields)
    assert str(caught.value).startswith("config.json: ")
    assert str(caught.value).count("config.json") == 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")]
)
def test_defaults_are_those_of_transformers(model_type: str, name: str, transformers: Any) -> None:
    theirs = getattr(transformers, f"{name}Config")()
    config = config_of(
        model_type,
        num_attention_heads=32,
        hidden_size=4096,
        head_dim=128,
        num_key_value_heads=...,
        max_position_embeddings=...,
    )
    assert config.num_key_value_heads == theirs.num_key_value_heads
    assert config.max_model_len == (theirs.sliding_window if name == "Mistral" else theirs.max_position_embeddings)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope == Rope(theirs.rope_parameters["rope_theta"])
    assert config.tie_word_embeddings is theirs.tie_word_embeddings is False


def test_head_dim_missing_or_null_is_the_share_of_hidden_size() -> None:
    """C116."""
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        assert config_of(model_type, hidden_size=24, head_dim=16).head_dim == 16
        assert config_of(model_type, hidden_size=24, head_dim=None).head_dim == 6
        assert config_of(model_type, hidden_size=24, head_dim=...).head_dim == 6
    assert "hidden_size=26: must be a multiple of num_attention_heads=4" in refusal(hidden_size=26)
    assert config_of(hidden_size=26, head_dim=8).head_dim == 8


def test_biases_are_the_familys_own_rule() -> None:
    """C122."""

    def biases(*args: Any, **fields: Any) -> tuple[bool, bool, bool]:
        config = config_of(*args, **fields)
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases("llama") == (False, False, False)
    assert biases("llama", attention_bias=True) == (True, True, False)
    assert biases("llama", mlp_bias=True) == (False, False, True)
    assert biases("mistral", attention_bias=True, mlp_bias=True) == (False, False, False)
    assert biases("qwen2") == biases("qwen2", attention_bias=False) == (True, False, False)
    assert biases("qwen3") == (False, False, False)
    assert biases("qwen3", attention_bias=True) == (True, True, False)
    assert [config_of(name).qk_norm for name in ("llama", "mistral", "qwen2", "qwen3")] == [False, False, False, True]


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 1.0}}, 1e6),
        ({"rope_scaling": None}, 1e4),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({"rope_scaling": {"type": "default"}}, 1e4),
        ({"rope_scaling": {}, "rope_parameters": None}, 1e4),
        ({"rope_parameters": {"rope_theta": 250.0}, "rope_theta": 500.0}, 250.0),
        ({"rope_theta": None}, 1e4),
    ],
)
def test_default_is_no_scaling(fields: Mapping[str, Any], theta: float) -> None:
    """C119."""
    assert config_of(**fields).rope == Rope(theta)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4}, LinearScaling(4.0)),
        (
            {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32},
            Llama3Scaling(8.0, 1.0, 4.0, 32),
        ),
        ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, Llama3Scaling(8.0, 1.0, 4.0, 64)),
        ({"type": "yarn", "factor": 1.0}, YarnScaling(1.0, 64, 1.0)),
        ({"type": "yarn", "original_max_position_embeddings": 64}, YarnScaling(1.0, 64, 1.0)),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "attention_factor": 2,
                "beta_fast": None,
                "beta_slow": 0.5,
                "truncate": False,
            },
            YarnScaling(4.0, 64, 2.0, 32.0, 0.5, truncate=False),
        ),
    ],
)
def test_scaling_in_its_old_and_new_forms(scaling: dict[str, Any], expected: object) -> None:
    rope_type = scaling.pop("type", "llama3")
    old = config_of(rope_theta=700.0, rope_scaling={"type": rope_type, **scaling})
    new = config_of(rope_parameters={"rope_theta": 700.0, "rope_type": rope_type, **scaling})
    assert old == new
    assert old.rope == Rope(700.0, expected)  # type: ignore[arg-type]
    scaling["type"] = rope_type


def test_yarn_without_an_original_context_takes_that_of_the_model() -> None:
    """C119."""
    scaling = config_of(rope_scaling={"rope_type": "yarn", "factor": 2.0}).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_max_position_embeddings == 64
    outside = config_of(rope_scaling={"rope_type": "yarn", "factor": 2.0}, original_max_position_embeddings=16)
    assert outside.rope.scaling == YarnScaling(2.0, 16, scaling.attention_factor)


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}}, 64),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}}, 64),
    ],
)
def test_the_longest_request_follows_the_scaling(fields: Mapping[str, Any], longest: int) -> None:
    assert config_of(**fields).max_model_len == longest


@pytest.mark.parametrize(
    ("model_type", "fields", "longest"),
    [
        ("mistral", {"sliding_window": 16}, 16),
        ("mistral", {"sliding_window": None}, 64),
        ("mistral", {"sliding_window": 100}, 64),
        ("mistral", {"max_position_embeddings": 32768}, 4096),
        ("llama", {"sliding_window": 16}, 64),
        ("qwen2", {"sliding_window": 16}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, 64),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 2}, 64),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, 64),
        (
            "qwen3",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            16,
        ),
    ],
)
def test_a_sliding_window_limits_the_length(model_type: str, fields: Mapping[str, Any], longest: int) -> None:
    assert config_of(model_type, **fields).max_model_len == longest


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic", "su", "mrope", "LINEAR", ""])
def test_an_unknown_rope_type_names_the_known_ones(rope_type: str) -> None:
    """C119."""
    for fields in ({"rope_scaling": {"rope_type": rope_type}}, {"rope_parameters": {"type": rope_type, "factor": 2}}):
        assert f"rope_type={rope_type!r}: must be one of default, linear, llama3, yarn" in refusal(**fields)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling: factor='4': must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling: factor=-1.0: must be above 0"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling: rope_type=None: is missing beside factor=4.0"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': must be an object"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_scaling: rope_type=3: must be a string"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters: full_attention="),
        ({"rope_parameters": {"rope_theta": True}}, "rope_parameters: rope_theta=True: must be a finite number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: only 1.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25: only 1.0"),
        ({"rope_theta": 0}, "rope_theta=0.0"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"vocab_size": "61"}, "vocab_size='61': must be an integer"),
        ({"vocab_size": 61.0}, "vocab_size=61.0: must be an integer"),
        ({"num_attention_heads": True}, "num_attention_heads=True: must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be an integer of at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0: must be an integer of at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': must be true or false"),
        ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only silu is built"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
)
def test_a_bad_field_is_named(fields: Mapping[str, Any], names: str) -> None:
    assert names in refusal(**fields)


def test_layers_of_a_kind_that_is_not_built_are_refused() -> None:
    fields = {"use_sliding_window": True, "layer_types": ["linear_attention"]}
    assert "'linear_attention' isn't built" in refusal("qwen3", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gpt2"},
        {"model_type": ...},
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["MistralForCausalLM"]},
        {"model_type": ..., "architectures": []},
    ],
)
def test_an_unknown_architecture_names_those_that_work(fields: Mapping[str, Any]) -> None:
    message = refusal(**fields)
    assert "unknown architecture" in message
    for name in ("LlamaForCausalLM (llama)", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in message


def test_either_name_of_an_architecture_will_do() -> None:
    both = config_of("qwen2", architectures=["Qwen2ForCausalLM"])
    assert both == config_of("qwen2") == config_of("", architectures=["Qwen2ForCausalLM"])
    assert both == config_of("qwen2", architectures=None)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "not valid JSON"),
        ('{"a": ', "not valid JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("\xff", "not valid JSON"),
    ],
)
def test_what_is_not_a_json_object_is_refused(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=names) as caught:
        Fields.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_in_its_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Fields.read(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="can't be read"):
        Fields.read(tmp_path)


def test_json_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"n": 3, "list": [1], "null": None}))
    fields = Fields.read(path)
    assert fields.integer("n") == 3
    assert fields.items("list") == [1]
    assert not fields.has("null")
    assert fields.text("null", "else") == "else"
