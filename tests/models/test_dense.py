"""The dense decoder against transformers, for every architecture and every way to cut a batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from attrs import evolve

from fstep.models.checkpoint import Checkpoint, load_checkpoint
from fstep.models.dense import DenseConfig, DenseDecoder, assemble, tensor_shapes
from fstep.state import CheckpointError, LayerSpec
from tests.models.conftest import ARCHITECTURES, Handmade, Oracle
from tests.models.torch_kernels import (
    Chunk,
    PlainKernels,
    PlainKV,
    TransposedKernels,
    device_inputs,
    logits_at_once,
    logits_in_steps,
)

TOLERANCE = 1e-4
LENGTHS = (1, 4, 17, 40, 64)  #: up to max_position_embeddings, past the original context of scaled rotations
CONFIG = DenseConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_model_len=16,
)


def prompts_of(rng: random.Random, vocab_size: int = 61) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_position_equals_transformers(name: str, oracle: Callable[[str], Oracle]) -> None:
    checkpoint = load_checkpoint(oracle(name).folder)
    for prompt in prompts_of(random.Random(1)):
        expected = oracle(name).logits(prompt)
        assert expected.std() > 0.5  # logits that all are alike would agree with anything
        assert gap(logits_at_once(checkpoint.model, checkpoint.params, prompt), expected) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_chunking_and_batch_equals_transformers(name: str, seed: int, oracle: Callable[[str], Oracle]) -> None:
    checkpoint = load_checkpoint(oracle(name).folder)
    rng = random.Random(seed)
    prompts = prompts_of(rng)
    kernels = (PlainKernels(), TransposedKernels())[seed % 2]
    found = logits_in_steps(checkpoint.model, checkpoint.params, prompts, rng, rng.choice((1, 3, 4, 16)), kernels)
    for prompt, logits in zip(prompts, found, strict=True):
        assert gap(logits, oracle(name).logits(prompt)) < TOLERANCE


def test_logits_are_float32_and_layers_state_their_kv(oracle: Callable[[str], Oracle]) -> None:
    checkpoint = load_checkpoint(oracle("qwen3").folder)
    assert checkpoint.model.vocab_size == 61
    assert checkpoint.model.max_model_len == 64
    assert checkpoint.model.kv_specs() == (LayerSpec(num_kv_heads=2, head_dim=16),) * 3
    assert checkpoint.model.kv_specs()[0].bytes_per_token() == 2 * 2 * 16 * 4
    assert logits_at_once(checkpoint.model, checkpoint.params, [1, 2]).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3"])
def test_a_narrow_dtype_is_no_further_off_than_transformers(
    name: str, dtype: str, oracle: Callable[[str], Oracle]
) -> None:
    checkpoint = load_checkpoint(oracle(name).folder, dtype)
    assert {spec.dtype for spec in checkpoint.model.kv_specs()} == {dtype}
    assert checkpoint.params["layers"][0]["qkv_proj"]["weight"].dtype == getattr(torch, dtype)
    assert checkpoint.params["inv_freq"].dtype == torch.float32
    prompt, exact = list(range(40)), oracle(name).logits(list(range(40)))
    narrow = oracle(name).read_as(getattr(torch, dtype))
    logits = logits_at_once(checkpoint.model, checkpoint.params, prompt)
    assert logits.dtype == torch.float32
    assert (logits - exact).square().mean() < 2 * (narrow.logits(prompt) - exact).square().mean()


@pytest.fixture(scope="module")
def tapped(oracle: Callable[[str], Oracle]) -> Checkpoint:
    return load_checkpoint(oracle("qwen3").folder)


def run(checkpoint: Checkpoint, taps: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    kv = PlainKV.of(checkpoint.model.kv_specs(), 2, 8)
    x = device_inputs([Chunk(0, (5, 6, 7), 0, (1,))], 8)
    hidden = checkpoint.model.hidden(checkpoint.params, x, kv, PlainKernels(), taps)
    return hidden.states, dict(hidden.taps)


def test_taps_are_what_they_are_named_for(tapped: Checkpoint, oracle: Callable[[str], Oracle]) -> None:
    names = ("embed", *(f"layers.{n}{part}" for n in range(3) for part in ("", ".attn", ".mlp")), "norm")
    states, taps = run(tapped, names)
    assert tuple(taps) == names
    inner = oracle("qwen3").model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    expected = dict(zip(("embed", "layers.0", "layers.1", "norm"), inner, strict=True))
    for name, tensor in expected.items():
        assert gap(taps[name], tensor[0].detach()) < TOLERANCE
    before = taps["embed"]
    for n in range(3):
        assert gap(before + taps[f"layers.{n}.attn"] + taps[f"layers.{n}.mlp"], taps[f"layers.{n}"]) < TOLERANCE
        before = taps[f"layers.{n}"]
    assert taps["norm"] is states
    assert torch.equal(run(tapped, ())[0], states)


def test_only_the_taps_asked_for_come_back(tapped: Checkpoint) -> None:
    assert set(run(tapped, ("layers.1.attn",))[1]) == {"layers.1.attn"}
    assert run(tapped, ())[1] == {}


@pytest.mark.parametrize("name", ["layers.3", "layers.-1", "layers.1.q", "", "logits"])
def test_an_unknown_tap_names_those_that_exist(tapped: Checkpoint, name: str) -> None:
    with pytest.raises(ValueError, match=r"there are embed, layers\.0\.attn, .*layers\.2, norm") as caught:
        run(tapped, ("embed", name))
    assert repr(name) in str(caught.value)


def test_padding_is_inert(tapped: Checkpoint) -> None:
    kv = PlainKV.of(tapped.model.kv_specs(), 3, 4)
    chunk = Chunk(0, (5, 6, 7), 0, (2,))
    alone = tapped.model.hidden(tapped.params, device_inputs([chunk], 4), kv, PlainKernels()).states
    padded = device_inputs([chunk], 4, padded_tokens=5, padded_reqs=2)
    states = tapped.model.hidden(tapped.params, padded, kv, PlainKernels()).states
    assert torch.equal(states[:3], alone)
    assert kv.layers[0].k[:2].isnan().all()  # nothing was written to the null block or to a block of nobody


def test_nothing_that_was_given_is_changed(tapped: Checkpoint) -> None:
    before = [tensor.clone() for tensor in leaves(tapped.params)]
    run(tapped, ("layers.0",))
    assert all(torch.equal(a, b) for a, b in zip(before, leaves(tapped.params), strict=True))


def leaves(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]  # type: ignore[union-attr]


def filled(config: DenseConfig) -> dict[str, torch.Tensor]:
    return {name: torch.rand(shape) for name, shape in tensor_shapes(config).items()}


def test_assemble_reads_each_tensor_once_and_keeps_no_second_copy() -> None:
    config = evolve(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    tensors, asked = filled(config), list[str]()

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        return tensors[name]

    tree = assemble(config, tensors, read)
    assert sorted(asked) == sorted(tensors)
    given = sum(tensor.numel() for tensor in tensors.values())
    repeated = (config.num_qk_heads - 2) * config.head_dim * config.num_hidden_layers  # one norm a head
    assert sum(leaf.numel() for leaf in leaves(tree)) == given + repeated + config.head_dim // 2


def test_assemble_names_every_missing_tensor() -> None:
    tensors = filled(CONFIG)
    gone = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight")
    left = [name for name in tensors if name not in gone]
    with pytest.raises(CheckpointError) as caught:
        assemble(CONFIG, left, tensors.__getitem__)
    assert all(name in str(caught.value) for name in gone)
    assert "q_proj" not in str(caught.value)


def test_assemble_refuses_a_missing_head_of_untied_embeddings() -> None:
    tensors = filled(CONFIG)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings=False"):
        assemble(CONFIG, tensors.keys() - {"lm_head.weight"}, tensors.__getitem__)
    tied = evolve(CONFIG, tie_word_embeddings=True)
    tree = assemble(tied, tensors.keys() - {"lm_head.weight"}, tensors.__getitem__)
    hidden = torch.rand(2, 8)
    logits = DenseDecoder(tied).logits(tree, hidden, PlainKernels())
    torch.testing.assert_close(logits, hidden @ tensors["model.embed_tokens.weight"].T)


@pytest.mark.parametrize(
    "changed", [{"qkv_bias": True}, {"o_bias": True}, {"mlp_bias": True}, {"qk_norm": True}, {"num_hidden_layers": 3}]
)
def test_assemble_refuses_tensors_too_few_and_too_many_by_name(changed: dict[str, int]) -> None:
    more = evolve(CONFIG, **changed)
    extra = tensor_shapes(more).keys() - tensor_shapes(CONFIG).keys()
    assert extra
    for config, stored in ((more, CONFIG), (CONFIG, more)):
        tensors = filled(stored)
        with pytest.raises(CheckpointError) as caught:
            assemble(config, tensors, tensors.__getitem__)
        assert all(name in str(caught.value) for name in extra)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (12, 8)),
        ("model.layers.1.self_attn.q_proj.weight", (8, 9)),
        ("model.layers.0.self_attn.k_proj.weight", (8, 8)),
        ("model.layers.1.mlp.down_proj.weight", (12, 8)),
        ("model.layers.0.input_layernorm.weight", (1, 8)),
    ],
)
def test_assemble_names_a_wrong_shape(name: str, shape: tuple[int, ...]) -> None:
    tensors = {**filled(CONFIG), name: torch.rand(shape)}
    expected = list(tensor_shapes(CONFIG)[name])
    with pytest.raises(CheckpointError) as caught:
        assemble(CONFIG, tensors, tensors.__getitem__)
    assert name in str(caught.value)
    assert f"{list(shape)}, expected {expected}" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", 5),
        ("head_dim", 0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1.0),
        ("max_model_len", 0),
        ("dtype", "int8"),
    ],
)
def test_a_config_names_the_field_that_is_out_of_range(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{field}="):
        evolve(CONFIG, **{field: value})


def test_head_dim_is_its_own_field(handmade: Callable[..., Handmade]) -> None:
    """C116."""
    made = handmade("qwen3", hidden_size=24, head_dim=16)
    shapes = {name: list(made.tensors[f"model.layers.0.self_attn.{name}_proj.weight"].shape) for name in "qkvo"}
    assert shapes == {"q": [64, 24], "k": [32, 24], "v": [32, 24], "o": [24, 64]}
    model = load_checkpoint(made.folder).model
    assert model.kv_specs()[0] == LayerSpec(num_kv_heads=2, head_dim=16)
