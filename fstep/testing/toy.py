"""A transformer in thirty lines: the shortest `Model` with attention, to copy from.

It has learned positions, one head of attention a layer and a small MLP, no norms, no biases, and random weights.
Everything that it needs to know of paging, chunks and batches is two calls: write the batch's K and V, then attend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from fstep.state import KV, AttentionSpec, DeviceInputs, Hidden, Kernels, LayerSpec, Tree

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class ToyTransformer:
    """`num_layers` layers of width `width` over `vocab_size` ids. No taps."""

    vocab_size: int = 64
    max_model_len: int = 128
    width: int = 16
    num_layers: int = 2

    def kv_specs(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(num_kv_heads=1, head_dim=self.width),) * self.num_layers

    def hidden(self, params: Tree, x: DeviceInputs, kv: KV, kernels: Kernels, taps: tuple[str, ...] = ()) -> Hidden:
        if taps:
            raise ValueError(f"no taps {taps}: this model has none")
        spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=self.width, scale=self.width**-0.5)
        states: Tensor = params["embed"][x.token_ids] + params["position"][x.positions]
        for layer, weights in zip(kv.layers, params["layers"], strict=True):
            q, k, v = (kernels.linear(states, weights[name])[:, None] for name in "qkv")
            kernels.write_kv(layer, k, v, x.groups[0].slot_mapping)
            states = states + kernels.attention(q, layer, x.groups[0], spec)[:, 0]
            states = states + kernels.linear(kernels.linear(states, weights["up"]).relu(), weights["down"])
        return Hidden(states)

    def logits(self, params: Tree, hidden: Tensor, kernels: Kernels) -> Tensor:
        return kernels.linear(hidden, params["embed"])

    def init(self, seed: int = 0) -> Tree:
        """Random parameters."""
        import torch

        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        shapes = dict.fromkeys("qkv", (self.width, self.width))
        shapes |= {"up": (4 * self.width, self.width), "down": (self.width, 4 * self.width)}
        layers = tuple({name: draw(*shape) for name, shape in shapes.items()} for _ in range(self.num_layers))
        return {
            "embed": draw(self.vocab_size, self.width),
            "position": draw(self.max_model_len, self.width),
            "layers": layers,
        }
