"""GGUF checkpoints against transformers: the same weights and logits, for every architecture and scaling."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import quantize

from fstep.models.checkpoint import load_checkpoint
from fstep.models.gguf import read_gguf, unpermuted
from fstep.models.gguf_file import GGUFFile
from fstep.models.rope import yarn_attention_factor
from fstep.state import CheckpointError
from tests.models.conftest import ARCHITECTURES, TINY, Oracle
from tests.models.gguf_files import default_model, interleaved, metadata_of, patch_type, tensors_of, write, write_model
from tests.models.torch_kernels import logits_at_once

TOLERANCE = 1e-4
UNTOLD = {"qwen2-yarn-untruncated"}  # GGUF has no word for it
YARN = {"qwen2-yarn": ("mscale", 0.7, 1.3)}  # nor for these two, but for the factor that follows from them


def prompt_of(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]


def sharper(name: str) -> Mapping[str, Any]:
    """What a file says of attention that YaRN's plain rule wouldn't give."""
    if name not in YARN:
        return {}
    _, mscale, all_dim = YARN[name]
    return {"qwen2.rope.scaling.attn_factor": yarn_attention_factor(4.0, mscale, all_dim) / yarn_attention_factor(4.0)}


@pytest.fixture
def tiny(build: Callable[..., Oracle], tmp_path: Path) -> Callable[..., Path]:
    """A whole file of a tiny llama (or another family), for a test to change: None takes an entry out."""

    def make(
        architecture: str = "Llama",
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray | None] | None = None,
    ) -> Path:
        model = build(architecture, sliding_window=None).model
        words, arrays = {**metadata_of(model.config), **(metadata or {})}, {**tensors_of(model), **(tensors or {})}
        kept = {key: value for key, value in words.items() if value is not None}
        return write(tmp_path / "tiny.gguf", kept, {name: each for name, each in arrays.items() if each is not None})

    return make


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - UNTOLD))
def test_logits_equal_those_of_the_model_in_the_file(
    name: str, oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(write_model(tmp_path / "model.gguf", oracle(name).model, sharper(name)))
    for seed, length in ((1, 64), (2, 9)):
        prompt = prompt_of(seed, length)
        expected = oracle(name).logits(prompt)
        assert expected.std() > 0.5
        assert float((logits_at_once(checkpoint.model, checkpoint.params, prompt) - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama-head-dim", "qwen2"])  # it reads no head_dim for qwen3
def test_transformers_reads_the_same_model_from_the_file(
    name: str, oracle: Callable[[str], Oracle], transformers: Any, tmp_path: Path
) -> None:
    """So the files that these tests write have the order of rows that GGUF files have."""
    tokens = {"tokenizer.ggml.tokens": [f"t{n}" for n in range(TINY["vocab_size"])]}  # it counts them
    write_model(tmp_path / "model.gguf", oracle(name).model, tokens)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.float32
        )
        logits = theirs(torch.tensor([prompt_of(3)])).logits[0]
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert float((logits_at_once(checkpoint.model, checkpoint.params, prompt_of(3)) - logits).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-all-biases", "qwen2", "qwen3-tied-biases"])
def test_parameters_are_those_of_the_folder(name: str, oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    file = load_checkpoint(write_model(tmp_path / "model.gguf", oracle(name).model)).params
    folder = load_checkpoint(oracle(name).folder).params
    assert file.keys() == folder.keys()
    flat = [torch.utils._pytree.tree_flatten(tree)[0] for tree in (dict(file), dict(folder))]
    assert len(flat[0]) == len(flat[1]) > 10
    for ours, theirs in zip(*flat, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_rows_go_back_to_their_places() -> None:
    rows = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(interleaved(rows, 2), [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    for shape in ((12, 5), (12,)):
        tensor = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        np.testing.assert_array_equal(unpermuted(interleaved(tensor, 2), 2), tensor)


def test_the_default_model() -> None:
    checkpoint = load_checkpoint(default_model())
    config, file = checkpoint.model.config, GGUFFile.open(default_model())
    assert (config.num_hidden_layers, config.head_dim, config.max_model_len) == (30, 64, 8192)
    assert config.tie_word_embeddings
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.tokenizer is not None
    np.testing.assert_array_equal(checkpoint.params["embed_tokens"].numpy(), file.read("token_embd.weight"))
    layer = checkpoint.params["layers"][7]
    np.testing.assert_array_equal(layer["down_proj"]["weight"].numpy(), file.read("blk.7.ffn_down.weight"))
    np.testing.assert_array_equal(layer["qkv_proj"]["weight"][768:].numpy(), file.read("blk.7.attn_v.weight"))
    queries = layer["qkv_proj"]["weight"][:576].numpy()
    np.testing.assert_array_equal(interleaved(queries, 9), file.read("blk.7.attn_q.weight"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_are_cast(tiny: Callable[..., Path], dtype: str) -> None:
    params = load_checkpoint(tiny(), dtype).params
    exact = load_checkpoint(tiny()).params["layers"][0]["down_proj"]["weight"]
    assert torch.equal(params["layers"][0]["down_proj"]["weight"], exact.to(getattr(torch, dtype)))


def test_quantised_tensors(build: Callable[..., Oracle], tmp_path: Path) -> None:
    """A Q8_0 projection beside float32 norms, its rows put back in order after they were dequantised."""
    model = build("Llama").model
    tensors: dict[str, Any] = tensors_of(model)
    blocks = quantize(tensors["blk.1.attn_q.weight"], GGMLQuantizationType.Q8_0)
    types = {"blk.1.attn_q.weight": GGMLQuantizationType.Q8_0}
    path = write(tmp_path / "q8.gguf", metadata_of(model.config), {**tensors, "blk.1.attn_q.weight": blocks}, types)
    queries = load_checkpoint(path).params["layers"][1]["qkv_proj"]["weight"][: TINY["hidden_size"]]
    exact = model.model.layers[1].self_attn.q_proj.weight.detach()
    error = (queries - exact).abs().max()
    assert 0 < error <= exact.abs().max() / 127


# What a file may leave out, and how its words are read --------------------------------------------------------------


@pytest.mark.parametrize("ids", [{}, {"eos": 5}, {"eos": 5, "eot": 7}, {"eos": 7, "eot": 7}, {"eos": 61}])
def test_end_ids(tiny: Callable[..., Path], ids: Mapping[str, int]) -> None:
    words = {f"tokenizer.ggml.{name}_token_id": (value, GGUFValueType.UINT32) for name, value in ids.items()}
    expected = tuple(dict.fromkeys(value for value in ids.values() if value < 61))
    assert load_checkpoint(tiny(metadata=words)).eos_token_ids == expected


def test_a_file_without_a_tokenizer_has_none(tiny: Callable[..., Path]) -> None:
    assert load_checkpoint(tiny()).tokenizer is None


def test_what_may_be_missing(tiny: Callable[..., Path]) -> None:
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    config = load_checkpoint(tiny(metadata={f"llama.{name}": None for name in names})).model.config
    assert (config.head_dim, config.rope.theta) == (8, 10000.0)
    heads = {"llama.attention.head_count_kv": None}
    square = {f"blk.{n}.attn_{each}.weight": np.zeros((32, 32), np.float32) for n in range(3) for each in "kv"}
    assert load_checkpoint(tiny(metadata=heads, tensors=square)).model.config.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("words", "factor"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear", "factor": 4.0}, 4.0),
        ({"factor": 4.0}, 4.0),
        ({"type": "linear"}, None),
        ({"factor": 0.0}, None),
    ],
)
def test_linear_scaling(tiny: Callable[..., Path], words: Mapping[str, Any], factor: float | None) -> None:
    rope = load_checkpoint(
        tiny(metadata={f"llama.rope.scaling.{key}": each for key, each in words.items()})
    ).model.config
    assert getattr(rope.rope.scaling, "factor", None) == factor
    assert rope.max_model_len == TINY["max_position_embeddings"] * int(factor or 1)


def test_an_older_word_for_linear_scaling(tiny: Callable[..., Path]) -> None:
    config = load_checkpoint(tiny(metadata={"llama.rope.scale_linear": 2.0})).model.config
    assert config.rope.scaling.factor == 2.0


@pytest.mark.parametrize(("window", "expected"), [(0, 64), (16, 16), (4096, 64)])
def test_a_sliding_window_limits_the_length(tiny: Callable[..., Path], window: int, expected: int) -> None:
    path = tiny(metadata={"llama.attention.sliding_window": window})
    assert load_checkpoint(path).model.max_model_len == expected


def test_frequencies_of_old_files_are_passed_over(tiny: Callable[..., Path]) -> None:
    load_checkpoint(tiny(tensors={"blk.0.attn_rot_embd.weight": np.ones(4, np.float32)}))


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3", "mamba", "Llama"])
def test_an_unknown_architecture(tmp_path: Path, name: str) -> None:
    message = refused(write(tmp_path / "model.gguf", {"general.architecture": name}, {}))
    assert f"general.architecture={name!r}" in message
    assert "llama, qwen2, qwen3" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", None),
        ("block_count", 0),
        ("embedding_length", 33),
        ("attention.head_count", [4, 4, 4]),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 0),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.value_length", 16),
        ("rope.dimension_count", 4),
        ("rope.freq_base", 0.0),
        ("rope.scaling.type", "longrope"),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("expert_count", 8),
        ("expert_count", [8, 8]),
        ("attention.causal", False),
        ("attention.scale", 0.5),
        ("logit_scale", 0.25),
        ("context_length", "long"),
    ],
)
def test_metadata_that_is_missing_or_out_of_range(tiny: Callable[..., Path], key: str, value: Any) -> None:
    short = {
        "rope.freq_base": "rope_theta",
        "attention.head_count_kv": "num_key_value_heads",
        "embedding_length": "hidden_size",
    }
    entries = {f"llama.{key}": value}
    if key == "embedding_length":
        entries["llama.attention.key_length"] = None
        short = {}
    message = refused(tiny(metadata=entries))
    assert short.get(key, key) in message


def test_factors_beside_a_named_scaling(tiny: Callable[..., Path]) -> None:
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    message = refused(tiny(metadata={"llama.rope.scaling.factor": 2.0}, tensors=factors))
    assert "rope_freqs.weight" in message


@pytest.mark.parametrize("factors", [np.ones(3, np.float32), np.array([1, 0, 1, 1], np.float32)])
def test_factors_that_dont_fit(tiny: Callable[..., Path], factors: np.ndarray) -> None:
    assert "rope factors" in refused(tiny(tensors={"rope_freqs.weight": factors}))


@pytest.mark.parametrize(
    ("architecture", "tensor", "said"),
    [
        ("Llama", "blk.2.ffn_gate.weight", "model.layers.2.mlp.gate_proj.weight"),
        ("Llama", "token_embd.weight", "token_embd.weight"),
        ("Llama", "output_norm.weight", "model.norm.weight"),
        ("Qwen2", "blk.1.attn_k.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("Qwen2", "blk.0.attn_q.bias", "model.layers.0.self_attn.q_proj.bias"),
        ("Qwen3", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_a_missing_tensor(tiny: Callable[..., Path], architecture: str, tensor: str, said: str) -> None:
    message = refused(tiny(architecture, tensors={tensor: None}))
    assert "missing" in message
    assert said in message


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.3.attn_norm.weight", "blk.1.attn_q.bias", "else"])
def test_an_unexpected_tensor(tiny: Callable[..., Path], name: str) -> None:
    message = refused(tiny(tensors={name: np.ones(32, np.float32)}))
    assert "no place" in message
    assert name.removeprefix("blk.").split(".")[0] in message


@pytest.mark.parametrize("shape", [(31, 32), (64, 32), (32, 31), (33, 32)])
def test_a_tensor_of_another_shape(tiny: Callable[..., Path], shape: tuple[int, int]) -> None:
    message = refused(tiny(tensors={"blk.1.attn_q.weight": np.ones(shape, np.float32)}))
    assert "model.layers.1.self_attn.q_proj.weight" in message
    assert str(list(shape)) in message


def test_a_type_that_doesnt_exist(tiny: Callable[..., Path]) -> None:
    path = tiny()
    patch_type(path, "blk.0.attn_v.weight", 99)
    message = refused(path)
    for part in ("blk.0.attn_v.weight", "99", "Q4_1", "BF16", "F32"):
        assert part in message


def test_a_truncated_file(tiny: Callable[..., Path]) -> None:
    path = tiny()
    path.write_bytes(path.read_bytes()[:-4096])
    assert "truncated" in refused(path)
