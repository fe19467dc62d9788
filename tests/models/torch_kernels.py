"""Kernels and a KV cache written for obviousness: the reference for a model's logits and for faster kernels."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from fstep.state import (
    I32,
    AttentionMeta,
    AttentionSpec,
    DeviceInputs,
    DeviceMeta,
    Inputs,
    LayerKV,
    LayerSpec,
    Model,
    Tree,
    frozen_array,
    i32,
)


class PlainKernels:
    """The `Kernels` protocol, one token at a time."""

    def plan(self, meta: DeviceMeta, num_kv_heads: int, block_size: int) -> None:  # noqa: ARG002
        return None

    def write_kv(self, layer: LayerKV, k: Tensor, v: Tensor, slots: Tensor) -> None:
        block_size = layer.k.shape[2]
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                layer.k[slot // block_size, :, slot % block_size] = k[token]
                layer.v[slot // block_size, :, slot % block_size] = v[token]

    def attention(self, q: Tensor, layer: LayerKV, meta: DeviceMeta, spec: AttentionSpec) -> Tensor:
        out = torch.full_like(q, math.nan)  # padded tokens attend to nothing
        block_size, share = layer.k.shape[2], spec.num_heads // spec.num_kv_heads
        for b, seq_len in enumerate(meta.seq_lens.tolist()[: meta.host.num_reqs]):
            start, end = meta.query_start_loc[b : b + 2].tolist()
            blocks = meta.block_table[b].tolist()
            places = [(blocks[p // block_size], p % block_size) for p in range(seq_len)]
            keys, values = (
                torch.stack([pages[block, :, offset] for block, offset in places]).repeat_interleave(share, dim=1)
                for pages in (layer.k, layer.v)  # [seq_len, num_heads, head_dim] each
            )
            for token in range(start, end):
                seen = seq_len - end + token + 1
                weights = torch.softmax((keys[:seen] * q[token]).sum(-1) * spec.scale, dim=0)
                out[token] = (weights[..., None] * values[:seen]).sum(0)
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = x.new_empty((len(x), len(weight)))  # row by row: torch's sums may run in another order for more rows
        for row, y in zip(x, product, strict=True):
            y.copy_(weight @ row)
        return product if bias is None else product + bias

    def weight(self, matrix: Tensor) -> Tensor:
        return matrix

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x + more, self.rms_norm(x + more, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = heads.chunk(2, dim=-1)
        cos = cos[..., : cos.shape[-1] // 2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * torch.sigmoid(gate) * up


class TransposedKernels(PlainKernels):
    """The same, but products come back features-first, as some kernels like it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight, bias).T.contiguous().T


@frozen(eq=False)
class PlainKV:
    """The `KV` protocol over pages that hold NaN until they are written."""

    layers: tuple[LayerKV, ...]
    line: int = 0
    epoch: int = 0
    alive: bool = True
    written: Inputs | None = None

    @classmethod
    def of(cls, specs: Sequence[LayerSpec], num_blocks: int, block_size: int) -> PlainKV:
        def pages(spec: LayerSpec) -> Tensor:
            shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
            return torch.full(shape, math.nan, dtype=getattr(torch, spec.dtype))

        return cls(tuple(LayerKV(pages(spec), pages(spec)) for spec in specs))

    def advance(self, epoch: int, inputs: Inputs) -> PlainKV:
        return evolve(self, epoch=epoch, written=inputs)

    def copy_blocks(self, copies: tuple[I32, ...]) -> None:
        for layer in self.layers:
            for source, copy in copies[0].tolist():
                layer.k[copy], layer.v[copy] = layer.k[source], layer.v[source]

    def clone(self) -> PlainKV:
        copies = tuple(LayerKV(layer.k.clone(), layer.v.clone()) for layer in self.layers)
        return evolve(self, layers=copies, line=self.line + 1)


@frozen
class Chunk:
    """Some successive tokens of a request, and the blocks that it has."""

    request: int
    token_ids: tuple[int, ...]
    start: int  #: position of the first of them
    blocks: tuple[int, ...]


def device_inputs(
    chunks: Sequence[Chunk], block_size: int, padded_tokens: int = 0, padded_reqs: int = 0
) -> DeviceInputs:
    """The arrays of a step, straight from what they mean."""
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    spots = [(chunk, chunk.start + n) for chunk in chunks for n in range(len(chunk.token_ids))]
    slots = [chunk.blocks[p // block_size] * block_size + p % block_size for chunk, p in spots]
    lengths = [len(chunk.token_ids) for chunk in chunks]
    seq_lens = [chunk.start + len(chunk.token_ids) for chunk in chunks]
    table = np.zeros((len(chunks) + padded_reqs, max(len(chunk.blocks) for chunk in chunks)), np.int32)
    for b, chunk in enumerate(chunks):
        table[b, : len(chunk.blocks)] = chunk.blocks
    host = AttentionMeta(
        query_start_loc=i32([*np.cumsum([0, *lengths]), *[len(token_ids)] * padded_reqs]),
        seq_lens=i32([*seq_lens, *[0] * padded_reqs]),
        slot_mapping=i32([*slots, *[-1] * padded_tokens]),
        block_table=frozen_array(table),
        num_reqs=len(chunks),
        num_tokens=len(token_ids),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
    )
    arrays = (host.query_start_loc, host.seq_lens, host.slot_mapping, host.block_table)
    meta = DeviceMeta(host, *(torch.tensor(array) for array in arrays))
    positions = [p for _, p in spots] + [0] * padded_tokens
    everywhere = torch.arange(len(token_ids), dtype=torch.int32)
    token_ids += [0] * padded_tokens
    return DeviceInputs(
        torch.tensor(token_ids, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32), everywhere, (meta,)
    )


def random_steps(rng: random.Random, prompts: Sequence[Sequence[int]], block_size: int) -> Iterator[list[Chunk]]:
    """Batches that together compute every prompt: random requests in random order, chunks, and block ids."""
    owed = sum(-(-len(prompt) // block_size) for prompt in prompts)
    free = rng.sample(range(1, owed + 1), owed)
    blocks: list[list[int]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while any(done[r] < len(prompt) for r, prompt in enumerate(prompts)):
        waiting = [r for r, prompt in enumerate(prompts) if done[r] < len(prompt)]
        chunks: list[Chunk] = []
        for r in rng.sample(waiting, rng.randint(1, len(waiting))):
            size = rng.choice((1, rng.randint(1, len(prompts[r]) - done[r])))
            while len(blocks[r]) * block_size < done[r] + size:
                blocks[r].append(free.pop())
            chunks.append(Chunk(r, tuple(prompts[r][done[r] : done[r] + size]), done[r], tuple(blocks[r])))
            done[r] += size
        yield chunks


def logits_in_steps(
    model: Model,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    rng: random.Random,
    block_size: int = 4,
    kernels: PlainKernels | None = None,
) -> list[Tensor]:
    """The logits of every position of every prompt, `[len(prompt), V]` each, computed in `random_steps`."""
    kernels = kernels or PlainKernels()
    num_blocks = 1 + sum(-(-len(prompt) // block_size) for prompt in prompts)
    kv = PlainKV.of(model.kv_specs(), num_blocks, block_size)
    found = [torch.full((len(prompt), model.vocab_size), math.nan) for prompt in prompts]
    for chunks in random_steps(rng, prompts, block_size):
        x = device_inputs(chunks, block_size, padded_tokens=rng.randint(0, 3), padded_reqs=rng.randint(0, 2))
        states = model.hidden(params, x, kv, kernels).states
        logits = model.logits(params, states[x.logits_indices], kernels)
        for chunk in chunks:
            size = len(chunk.token_ids)
            found[chunk.request][chunk.start : chunk.start + size], logits = logits[:size], logits[size:]
    return found


def logits_at_once(model: Model, params: Tree, prompt: Sequence[int], kernels: PlainKernels | None = None) -> Tensor:
    """The logits of every position of a prompt that is one chunk of one block: `[len(prompt), V]`."""
    kernels = kernels or PlainKernels()
    kv = PlainKV.of(model.kv_specs(), 2, len(prompt))
    x = device_inputs([Chunk(0, tuple(prompt), 0, (1,))], len(prompt))
    return model.logits(params, model.hidden(params, x, kv, kernels).states, kernels)
