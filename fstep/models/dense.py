"""The dense decoder of Llama, SmolLM2, Mistral, Qwen2, Qwen2.5 and Qwen3, as pure functions over a parameter tree.

The tree (`H` hidden size, `D` head_dim, `A` and `K` numbers of query and KV heads, `I` intermediate size, `V`
vocabulary; weights are `[out, in]`)::

    embed_tokens        [V, H]
    inv_freq            [D / 2] float32
    layers              a tuple, one mapping a layer:
        input_layernorm             [H]
        qkv_proj                    {weight [(A + 2 K) D, H], bias [(A + 2 K) D]}: queries, keys, values
        qk_norm                     [A + K, D]: the norm of query heads, then that of key heads; Qwen3
        o_proj                      {weight [H, A D], bias [H]}
        post_attention_layernorm    [H]
        gate_up_proj                {weight [2 I, H], bias [2 I]}: gate, up
        down_proj                   {weight [H, I], bias [H]}
    norm                [H]
    lm_head.weight      [V, H]; that of the embeddings, if they are tied

A key that a configuration has no use for (a bias, `qk_norm`) is absent. Queries, keys and values are one
product, and gate and up are one, because at one token the number of calls counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fstep.models.rope import Rope, Rotation
from fstep.state import (
    KV,
    AttentionSpec,
    CheckpointError,
    DeviceInputs,
    DeviceMeta,
    Hidden,
    Kernels,
    LayerKV,
    LayerSpec,
    Tree,
)

EMBEDDINGS, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16")


@frozen(kw_only=True)
class DenseConfig:
    """The shape of a dense decoder, whatever file it was read from.

    Raises `CheckpointError` naming the field, its value and the limit.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  #: its own field: Qwen3's isn't hidden_size / num_attention_heads
    max_model_len: int  #: tokens
    rms_norm_eps: float = 1e-6
    rope: Rope = field(factory=Rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  #: RMS norm of each query and key head before the rotation
    tie_word_embeddings: bool = False
    dtype: str = "float32"  #: of parameters, activations and KV

    def __attrs_post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            self._check(name, getattr(self, name) > 0, "must be at least 1")
        self._check("max_model_len", self.max_model_len > 0, "must be at least 1")
        divides = self.num_key_value_heads > 0 and self.num_attention_heads % self.num_key_value_heads == 0
        self._check("num_key_value_heads", divides, f"must divide num_attention_heads={self.num_attention_heads}")
        self._check("head_dim", self.head_dim > 0 and self.head_dim % 2 == 0, "must be even, and at least 2")
        self._check("rms_norm_eps", 0 <= self.rms_norm_eps < math.inf, "must be a finite number of at least 0")
        self._check("dtype", self.dtype in DTYPES, f"must be one of {', '.join(DTYPES)}")

    def _check(self, name: str, holds: bool, limit: str) -> None:
        if not holds:
            raise CheckpointError(f"{name}={getattr(self, name)!r}: {limit}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_qk_heads(self) -> int:
        """Heads that are rotated."""
        return self.num_attention_heads + self.num_key_value_heads

    @property
    def num_heads(self) -> int:
        """Query, key and value heads."""
        return self.num_attention_heads + 2 * self.num_key_value_heads


@frozen
class DenseDecoder:
    """A `Model`: causal self-attention with grouped queries and rotary positions, and a gated MLP, pre-normed."""

    config: DenseConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        config = self.config
        spec = LayerSpec(config.num_key_value_heads, config.head_dim, dtype=config.dtype)
        return (spec,) * config.num_hidden_layers

    def hidden(self, params: Tree, x: DeviceInputs, kv: KV, kernels: Kernels, taps: tuple[str, ...] = ()) -> Hidden:
        """The normed last hidden state of every token.

        Taps: "embed", "layers.N.attn" and "layers.N.mlp" (what the block adds to the residual stream), "layers.N"
        (the stream after the layer), "norm": `[Tp, H]` each. Raises `ValueError` for any other name.
        """
        self._check_taps(taps)
        eps = self.config.rms_norm_eps
        states = F.embedding(x.token_ids, params["embed_tokens"])
        step = _shared(self.config, params, x, kernels)
        taken, layers = {"embed": states}, params["layers"]
        normed = kernels.rms_norm(states, layers[0]["input_layernorm"], eps)
        following = (*(layer["input_layernorm"] for layer in layers[1:]), params["norm"])
        for n, (layer, cache, norm) in enumerate(zip(layers, kv.layers, following, strict=True)):
            attn = _attention(step, layer, normed, cache)
            states, normed = kernels.add_rms_norm(states, attn, layer["post_attention_layernorm"], eps)
            mlp = _mlp(step, layer, normed)
            states, normed = kernels.add_rms_norm(states, mlp, norm, eps)
            if taps:
                named = {f"layers.{n}.attn": attn, f"layers.{n}.mlp": mlp, f"layers.{n}": states}
                taken.update((name, tensor) for name, tensor in named.items() if name in taps)
        taken["norm"] = normed
        return Hidden(taken["norm"], {name: taken[name] for name in taps})

    def logits(self, params: Tree, hidden: Tensor, kernels: Kernels) -> Tensor:
        return _linear(kernels, params["lm_head"], hidden).float()

    def _check_taps(self, taps: tuple[str, ...]) -> None:
        layers = [f"layers.{n}" for n in range(self.config.num_hidden_layers)] if taps else []
        known = ["embed", *(name + part for name in layers for part in (".attn", ".mlp", "")), "norm"]
        unknown = [name for name in taps if name not in known]
        if unknown:
            raise ValueError(f"no taps named {', '.join(map(repr, unknown))}; there are {', '.join(known)}")


@frozen(eq=False)
class _Shared:
    """What all layers of a step have in common."""

    config: DenseConfig
    rotation: Rotation
    spec: AttentionSpec
    meta: DeviceMeta
    kernels: Kernels


def _shared(config: DenseConfig, params: Tree, x: DeviceInputs, kernels: Kernels) -> _Shared:
    factor = config.rope.attention_factor
    rotation = Rotation.at(x.positions, params["inv_freq"], factor, config.torch_dtype)
    heads, head_dim = (config.num_attention_heads, config.num_key_value_heads), config.head_dim
    return _Shared(config, rotation, AttentionSpec(*heads, head_dim, head_dim**-0.5), x.groups[0], kernels)


def _attention(step: _Shared, layer: Mapping[str, Any], x: Tensor, cache: LayerKV) -> Tensor:
    """What attention adds to the residual stream; K and V of `x [Tp, H]` are written to the cache first."""
    config, kernels = step.config, step.kernels
    heads = _linear(kernels, layer["qkv_proj"], x).view(-1, config.num_heads, config.head_dim)
    qk, v = heads[:, : config.num_qk_heads], heads[:, config.num_qk_heads :]
    if config.qk_norm:
        qk = kernels.rms_norm(qk, layer["qk_norm"], config.rms_norm_eps)
    qk = kernels.rotate(qk, step.rotation.cos, step.rotation.sin)
    q, k = qk[:, : config.num_attention_heads], qk[:, config.num_attention_heads :]
    kernels.write_kv(cache, k, v, step.meta.slot_mapping)
    attended = kernels.attention(q, cache, step.meta, step.spec)
    return _linear(kernels, layer["o_proj"], attended.flatten(-2))


def _mlp(step: _Shared, layer: Mapping[str, Any], x: Tensor) -> Tensor:
    gated = step.kernels.silu_mul(_linear(step.kernels, layer["gate_up_proj"], x))
    return _linear(step.kernels, layer["down_proj"], gated)


def _linear(kernels: Kernels, product: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return kernels.linear(x, product["weight"], product.get("bias"))


def tensor_shapes(config: DenseConfig) -> Mapping[str, tuple[int, ...]]:
    """Each tensor that a checkpoint of this configuration has, by its Hugging Face name, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDINGS: (config.vocab_size, config.hidden_size)}
    for n in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    products = (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, into) for name, out, into, _ in products}
    shapes |= {f"{name}.bias": (out,) for name, out, _, biased in products if biased}
    shapes |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def assemble(config: DenseConfig, names: Iterable[str], read: Callable[[str], Tensor]) -> Tree:
    """The parameter tree, from a checkpoint's tensors by their Hugging Face names (`tensor_shapes`).

    `names` are all tensors that the checkpoint has, and `read` gives one; it is called once for each name, and what
    it gives may be kept as it is. Raises `CheckpointError` naming every tensor that is missing or that the
    configuration has no place for, or the first one with a wrong shape.
    """
    shapes = tensor_shapes(config)
    _check_names(config, shapes, set(names))

    def checked(name: str) -> Tensor:
        tensor = read(name)
        if tuple(tensor.shape) != shapes[name]:
            raise CheckpointError(f"tensor {name}: has shape {list(tensor.shape)}, expected {list(shapes[name])}")
        return tensor.to(config.torch_dtype)

    tree: dict[str, Any] = {"embed_tokens": checked(EMBEDDINGS), "inv_freq": config.rope.inv_freq(config.head_dim)}
    tree["layers"] = tuple(_layer(config, f"model.layers.{n}.", checked) for n in range(config.num_hidden_layers))
    tree["norm"] = checked("model.norm.weight")
    tree["lm_head"] = {"weight": tree["embed_tokens"] if config.tie_word_embeddings else checked(LM_HEAD)}
    return tree


def _check_names(config: DenseConfig, shapes: Mapping[str, object], names: set[str]) -> None:
    missing = [name for name in shapes if name not in names]
    if LM_HEAD in missing:
        raise CheckpointError(
            f"missing tensors: {', '.join(missing)} (tie_word_embeddings={config.tie_word_embeddings}, so the output "
            "layer needs weights of its own)"
        )
    if missing:
        raise CheckpointError(f"missing tensors: {', '.join(missing)}")
    unexpected = sorted(names - shapes.keys())
    if unexpected:
        raise CheckpointError(f"tensors that the configuration has no place for: {', '.join(unexpected)}")


def _layer(config: DenseConfig, prefix: str, read: Callable[[str], Tensor]) -> Tree:
    def product(block: str, names: tuple[str, ...], biased: bool) -> dict[str, Tensor]:
        leaves = ("weight", "bias") if biased else ("weight",)
        return {leaf: _joined([read(f"{prefix}{block}.{name}.{leaf}") for name in names]) for leaf in leaves}

    layer: dict[str, Any] = {
        "input_layernorm": read(f"{prefix}input_layernorm.weight"),
        "qkv_proj": product("self_attn", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
        "o_proj": product("self_attn", ("o_proj",), config.o_bias),
        "post_attention_layernorm": read(f"{prefix}post_attention_layernorm.weight"),
        "gate_up_proj": product("mlp", ("gate_proj", "up_proj"), config.mlp_bias),
        "down_proj": product("mlp", ("down_proj",), config.mlp_bias),
    }
    if config.qk_norm:
        q_norm, k_norm = (read(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
        queries, keys = q_norm.expand(config.num_attention_heads, -1), k_norm.expand(config.num_key_value_heads, -1)
        layer["qk_norm"] = torch.cat((queries, keys))
    return layer


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
