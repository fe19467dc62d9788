"""Checkpoints in a GGUF file: metadata as a `DenseConfig`, tensors by their Hugging Face names.

The architectures "llama" (which SmolLM2 and Mistral have too), "qwen2" and "qwen3". In files of "llama" the rows of
query and key projections are stored for a rotation of neighbouring dimensions, `(2 i, 2 i + 1)`; here they go back to
the order of Hugging Face, `(i, i + head_dim / 2)`. The scaling of Llama 3 comes as a tensor of frequency factors.
"""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from attrs import frozen

from fstep.models.checkpoint import Checkpoint
from fstep.models.dense import EMBEDDINGS, LM_HEAD, DenseConfig, DenseDecoder, assemble
from fstep.models.gguf_file import GGUFFile
from fstep.models.gguf_tokenizer import tokenizer_from_gguf
from fstep.models.hf_config import Fields, stretched
from fstep.models.rope import FrequencyFactors, LinearScaling, Rope, RopeScaling, YarnScaling, yarn_attention_factor
from fstep.state import F32, CheckpointError, Tree

ROPE_TYPES: Final = ("none", "linear", "yarn")
_ROPE_FACTORS = "rope_freqs.weight"
_WORKED_OUT = ".attn_rot_embd.weight"  # old files: the plain frequencies, which nobody needs to read
_MAX_THREADS = 4


@frozen
class _Architecture:
    """How a family's files differ from the others'."""

    name: str
    permuted: bool = False  #: query and key rows are stored for neighbouring pairs
    qkv_bias: bool = False  #: always; elsewhere biases are there if the file has them
    qk_norm: bool = False


_ARCHITECTURES = (
    _Architecture("llama", permuted=True),
    _Architecture("qwen2", qkv_bias=True),
    _Architecture("qwen3", qk_norm=True),
)

_TOP: Final = MappingProxyType(
    {"token_embd.weight": EMBEDDINGS, "output_norm.weight": "model.norm.weight", "output.weight": LM_HEAD}
)
_BLOCK: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Metadata, without the architecture's name in front, that changes what the model computes in a way that isn't built,
# and the values that change nothing.
_NEUTRAL: Final = MappingProxyType(
    {
        "expert_count": (0,),
        "attention.scale": (0.0,),
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "logit_scale": (0.0, 1.0),
        "residual_scale": (0.0, 1.0),
        "embedding_scale": (0.0, 1.0),
        "use_parallel_residual": (False,),
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_log_multiplier": (0.0,),
    }
)


def read_gguf(path: Path, dtype: str = "float32") -> Checkpoint:
    """The checkpoint in a GGUF file, its tensors dequantised to float32 and then cast to `dtype`.

    Raises `CheckpointError` for a file that isn't whole, an unknown architecture or type of tensor (naming those that
    work), and any tensor or metadata that is missing, unexpected or out of its range.
    """
    file = GGUFFile.open(path)
    fields = Fields(str(path), file.metadata)
    family = _architecture(fields)
    try:
        config = _dense_config(file, fields, family, dtype)
        params = _params(file, config, family)
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from None
    return Checkpoint(
        DenseDecoder(config), params, _eos_token_ids(fields, config.vocab_size), tokenizer_from_gguf(fields)
    )


def _architecture(fields: Fields) -> _Architecture:
    name = fields.text("general.architecture", "")
    for family in _ARCHITECTURES:
        if family.name == name:
            return family
    works = ", ".join(family.name for family in _ARCHITECTURES)
    raise fields.error("general.architecture", f"unknown architecture; those that work are {works}")


def _dense_config(file: GGUFFile, fields: Fields, family: _Architecture, dtype: str) -> DenseConfig:
    arch = family.name
    _refuse_unbuilt(fields, arch)
    heads, hidden_size = fields.integer(f"{arch}.attention.head_count"), fields.integer(f"{arch}.embedding_length")
    positions, head_dim = fields.integer(f"{arch}.context_length"), _head_dim(fields, arch, hidden_size, heads)
    rope = Rope(fields.number(f"{arch}.rope.freq_base", 10000.0), _scaling(file, fields, arch, positions))
    return DenseConfig(
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length"),
        num_hidden_layers=fields.integer(f"{arch}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fields.integer(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_model_len=min(stretched(rope, positions), _window(fields, arch)),
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        qkv_bias=family.qkv_bias or _has(file, "attn_q.bias"),
        o_bias=_has(file, "attn_output.bias"),
        mlp_bias=_has(file, "ffn_gate.bias"),
        qk_norm=family.qk_norm,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=dtype,
    )


def _has(file: GGUFFile, name: str) -> bool:
    """Whether the first block has such a tensor; if the others don't agree, names are missing or unexpected later."""
    return f"blk.0.{name}" in file.tensors


def _refuse_unbuilt(fields: Fields, arch: str) -> None:
    for name, neutral in _NEUTRAL.items():
        value = fields.values.get(f"{arch}.{name}", neutral[0])
        if not isinstance(value, int | float) or value not in neutral:
            raise fields.error(f"{arch}.{name}", f"isn't built; only {' or '.join(map(str, neutral))} is")


def _head_dim(fields: Fields, arch: str, hidden_size: int, heads: int) -> int:
    if not fields.has(f"{arch}.attention.key_length") and hidden_size % heads:
        limit = f"must be a multiple of head_count={heads}, for want of attention.key_length"
        raise fields.error(f"{arch}.embedding_length", limit)
    head_dim = fields.integer(f"{arch}.attention.key_length", hidden_size // heads)
    for name, what in (("attention.value_length", "values as long as keys"), ("rope.dimension_count", "whole heads")):
        if fields.integer(f"{arch}.{name}", head_dim) != head_dim:
            raise fields.error(f"{arch}.{name}", f"must be head_dim={head_dim}: only {what} are built")
    return head_dim


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: missing tensor: token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _window(fields: Fields, arch: str) -> int:
    """Tokens that attention may span; within a sliding window nothing is hidden, so up to there it is exact."""
    return int(fields.number(f"{arch}.attention.sliding_window", 0.0)) or sys.maxsize


def _scaling(file: GGUFFile, fields: Fields, arch: str, positions: int) -> RopeScaling | None:
    named = _named_scaling(fields, arch, positions)
    if _ROPE_FACTORS not in file.tensors:
        return named
    if named is not None:
        raise fields.error(f"{arch}.rope.scaling.type", f"can't go together with a tensor {_ROPE_FACTORS}")
    return FrequencyFactors(tuple(file.read(_ROPE_FACTORS).ravel().tolist()))


def _named_scaling(fields: Fields, arch: str, positions: int) -> RopeScaling | None:
    """The scaling in the metadata. A factor without a type is linear, as in llama.cpp."""
    prefix = f"{arch}.rope.scaling."
    factor = fields.number(f"{prefix}factor", fields.number(f"{arch}.rope.scale_linear", 1.0))
    match fields.text(f"{prefix}type", "linear"):
        case "none":
            return None
        case "linear":
            return None if factor in (0.0, 1.0) else LinearScaling(factor)
        case "yarn":
            sharper = fields.number(f"{prefix}attn_factor", fields.number(f"{prefix}yarn_attn_factor", 1.0))
            return YarnScaling(
                factor,
                fields.integer(f"{prefix}original_context_length", positions),
                sharper * yarn_attention_factor(factor),
                fields.number(f"{prefix}yarn_beta_fast", 32.0),
                fields.number(f"{prefix}yarn_beta_slow", 1.0),
            )
        case _:
            raise fields.error(f"{prefix}type", f"must be one of {', '.join(ROPE_TYPES)}")


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a request: that of the end of a text and, in chat models, that of the end of a turn."""
    named = [fields.number(f"tokenizer.ggml.{name}_token_id", -1.0) for name in ("eos", "eot")]
    return tuple(dict.fromkeys(int(each) for each in named if 0 <= each < vocab_size))


def _params(file: GGUFFile, config: DenseConfig, family: _Architecture) -> Tree:
    """The parameter tree. Tensors are dequantised by several threads, ahead of the one that puts them together."""
    names = {_hf_name(name): name for name in file.tensors if name != _ROPE_FACTORS and not name.endswith(_WORKED_OUT)}
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        coming = {name: pool.submit(_read, file, config, family, name, stored) for name, stored in names.items()}
        return assemble(config, names, lambda name: torch.as_tensor(coming.pop(name).result()))
    finally:
        pool.shutdown(cancel_futures=True)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own if it has none there, so that an error can name it."""
    match = _IN_BLOCK.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        return _TOP.get(name, name)
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def _read(file: GGUFFile, config: DenseConfig, family: _Architecture, name: str, stored: str) -> F32:
    values = file.read(stored)
    for block, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if family.permuted and f"self_attn.{block}." in name and len(values) == heads * config.head_dim:
            return unpermuted(values, heads)
    return values  # one of the wrong length too: `assemble` refuses it by name


def unpermuted(values: F32, num_heads: int) -> F32:
    """A projection `[num_heads * head_dim, …]` whose rows go back from `(2 i, 2 i + 1)` to `(i, i + head_dim / 2)`."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
