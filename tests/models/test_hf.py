"""Folders of Hugging Face: whole ones against transformers, and every way that a folder can be broken."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fstep.models.checkpoint import load_checkpoint
from fstep.models.hf import read_folder
from fstep.state import CheckpointError
from tests.models.conftest import Handmade, Oracle
from tests.models.torch_kernels import logits_at_once, logits_in_steps

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
Make = Callable[..., Handmade]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert str(caught.value).count(str(folder)) == 1
    return str(caught.value)


def logits(folder: Path) -> torch.Tensor:
    checkpoint = load_checkpoint(folder)
    return logits_at_once(checkpoint.model, checkpoint.params, [1, 2, 3, 60])


def in_shards(made: Handmade) -> dict[str, str]:
    """The checkpoint as two shards with an index, every other tensor in the second: which file has each."""
    names = list(made.tensors)
    file_of = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(names)}
    for file in set(file_of.values()):
        made.write_tensors({name: made.tensors[name] for name in names if file_of[name] == file}, file)
    made.write_index(file_of)
    (made.folder / "model.safetensors").unlink()
    return file_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_weights_are_widened(dtype: str, build: Callable[..., Oracle]) -> None:
    oracle = build("Qwen3", dtype=dtype).read_as(torch.float32)
    checkpoint = load_checkpoint(oracle.folder)
    assert checkpoint.params["layers"][0]["gate_up_proj"]["weight"].dtype == torch.float32
    prompt = list(range(30))
    found = logits_in_steps(checkpoint.model, checkpoint.params, [prompt], random.Random(0))[0]
    assert float((found - oracle.logits(prompt)).abs().max()) < 1e-4


def test_shards_of_transformers(build: Callable[..., Oracle]) -> None:
    oracle = build("Llama", save={"max_shard_size": "20KB"})
    assert len(list(oracle.folder.glob("*.safetensors"))) > 2
    checkpoint = load_checkpoint(str(oracle.folder))
    found = logits_at_once(checkpoint.model, checkpoint.params, [1, 2, 3])
    assert float((found - oracle.logits([1, 2, 3])).abs().max()) < 1e-4


def test_a_window_is_exact_up_to_its_length(build: Callable[..., Oracle]) -> None:
    oracle = build("Mistral", sliding_window=8)
    checkpoint = load_checkpoint(oracle.folder)
    assert checkpoint.model.max_model_len == 8
    prompt = list(range(9))
    found = logits_at_once(checkpoint.model, checkpoint.params, prompt)
    distance = (found - oracle.logits(prompt)).abs().amax(dim=1)
    assert float(distance[:8].max()) < 1e-4
    assert float(distance[8]) > 1e-2  # one token more, and the window hides the first


def test_shards_are_the_same_as_one_file(handmade: Make) -> None:
    made = handmade("qwen2")
    whole = logits(made.folder)
    in_shards(made)
    assert torch.equal(logits(made.folder), whole)


def test_the_parameters_outlive_the_file(handmade: Make) -> None:
    made = handmade()
    checkpoint = load_checkpoint(made.folder)
    before = checkpoint.params["embed_tokens"].clone()
    size = (made.folder / "model.safetensors").stat().st_size
    with (made.folder / "model.safetensors").open("r+b") as file:
        file.write(bytes(size))
    assert torch.equal(checkpoint.params["embed_tokens"], before)


def test_a_missing_shard_is_named(handmade: Make) -> None:
    """C142."""
    made = handmade()
    in_shards(made)
    (made.folder / "model-00002-of-00002.safetensors").unlink()
    message = refusal(made.folder)
    assert "model-00002-of-00002.safetensors" in message
    assert "model-00001" not in message


def test_a_tensor_that_the_index_lacks_is_named(handmade: Make) -> None:
    """C142."""
    made = handmade()
    file_of = in_shards(made)
    file_of.pop("model.layers.1.mlp.up_proj.weight")
    made.write_index(file_of)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in refusal(made.folder)


def test_a_stray_file_beside_the_shards_is_ignored(handmade: Make) -> None:
    """C142."""
    made = handmade()
    whole = logits(made.folder)
    in_shards(made)
    made.write_tensors({name: torch.zeros_like(tensor) for name, tensor in made.tensors.items()})
    (made.folder / "pytorch_model.bin").write_bytes(b"junk")
    assert torch.equal(logits(made.folder), whole)


def test_of_a_tensor_in_both_shards_the_index_decides(handmade: Make) -> None:
    """C142."""
    made = handmade()
    whole = logits(made.folder)
    file_of = in_shards(made)
    first = {name: tensor for name, tensor in made.tensors.items() if file_of[name].startswith("model-00001")}
    other = next(name for name in made.tensors if name not in first)
    made.write_tensors({**first, other: torch.ones_like(made.tensors[other])}, "model-00001-of-00002.safetensors")
    assert torch.equal(logits(made.folder), whole)


def test_a_tensor_that_its_shard_lacks_is_named(handmade: Make) -> None:
    made = handmade()
    file_of = in_shards(made)
    name = next(name for name in file_of if file_of[name].startswith("model-00001"))
    made.write_index({**file_of, name: "model-00002-of-00002.safetensors"})
    assert f"{name} (model-00002-of-00002.safetensors)" in refusal(made.folder)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "not valid JSON"),
        ("{}", "weight_map is missing or empty"),
        ('{"weight_map": ["a"]}', "weight_map=['a']: must be an object"),
        ('{"weight_map": {"a": 3}}', "a=3: must be a file name in the folder"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "must be a file name in the folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "must be a file name in the folder"),
        ('{"weight_map": {"a": ""}}', "must be a file name in the folder"),
        ('{"weight_map": {"a": ".."}}', "must be a file name in the folder"),
    ],
)
def test_a_broken_index_is_refused(handmade: Make, text: str, names: str) -> None:
    made = handmade()
    (made.folder / "model.safetensors.index.json").write_text(text)
    assert names in refusal(made.folder)


def test_an_untied_head_that_is_missing_is_named_with_its_field(handmade: Make) -> None:
    """C115."""
    made = handmade(tie_word_embeddings=False)
    made.write_tensors({name: tensor for name, tensor in made.tensors.items() if name != HEAD})
    for field in (False, None, ...):  # untied is the default of all four families
        made.write_config(tie_word_embeddings=field)
        message = refusal(made.folder)
        assert HEAD in message
        assert "tie_word_embeddings=False" in message


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_tied_embeddings_need_no_head(handmade: Make, model_type: str) -> None:
    made = handmade(model_type, tie_word_embeddings=True)
    assert HEAD not in made.tensors
    tied = logits(made.folder)
    made.write_tensors({**made.tensors, HEAD: made.tensors[EMBEDDINGS].clone()})
    assert torch.equal(logits(made.folder), tied)
    made.write_config(tie_word_embeddings=False)
    assert torch.equal(logits(made.folder), tied)


def test_tied_embeddings_may_stand_under_the_heads_name(handmade: Make) -> None:
    made = handmade(tie_word_embeddings=True)
    tied = logits(made.folder)
    renamed = {HEAD if name == EMBEDDINGS else name: tensor for name, tensor in made.tensors.items()}
    made.write_tensors(renamed)
    assert torch.equal(logits(made.folder), tied)
    made.write_tensors({name: tensor for name, tensor in made.tensors.items() if name != EMBEDDINGS})
    assert f"missing tensors: {EMBEDDINGS}" in refusal(made.folder)


def test_a_head_that_contradicts_the_tie_is_refused(handmade: Make) -> None:
    made = handmade(tie_word_embeddings=True)
    made.write_tensors({**made.tensors, HEAD: torch.zeros(61, 32)})
    message = refusal(made.folder)
    assert "tie_word_embeddings=True" in message
    assert HEAD in message


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_bias_of_qwen2_that_is_missing_is_named(handmade: Make, part: str) -> None:
    """C122."""
    made = handmade("qwen2")
    gone = f"model.layers.1.self_attn.{part}.bias"
    made.write_tensors({name: tensor for name, tensor in made.tensors.items() if name != gone})
    assert f"missing tensors: {gone}" in refusal(made.folder)


@pytest.mark.parametrize(
    ("model_type", "name", "size"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias", 32),
        ("llama", "model.layers.1.mlp.down_proj.bias", 32),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias", 32),
        ("llama", "model.layers.0.self_attn.q_norm.weight", 8),
        ("llama", "model.layers.2.input_layernorm.weight", 32),
        ("llama", "model.layers.0.self_attn.q_proj.weight_scale", 1),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(handmade: Make, model_type: str, name: str, size: int) -> None:
    """C122."""
    made = handmade(model_type)
    made.write_tensors({**made.tensors, name: torch.zeros(size)})
    assert f"has no place for: {name}" in refusal(made.folder)


def test_frequencies_of_old_files_are_ignored(handmade: Make) -> None:
    made = handmade()
    expected = logits(made.folder)
    made.write_tensors({**made.tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert torch.equal(logits(made.folder), expected)


def test_a_wrong_shape_is_named_with_both(handmade: Make) -> None:
    made = handmade()
    made.write_config(vocab_size=64)
    assert f"tensor {EMBEDDINGS}: has shape [61, 32], expected [64, 32]" in refusal(made.folder)
    made.write_config(num_key_value_heads=4)
    message = refusal(made.folder)
    assert "model.layers.0.self_attn.k_proj.weight: has shape [16, 32], expected [32, 32]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_weights_that_are_no_plain_floats_are_refused(handmade: Make, dtype: torch.dtype) -> None:
    made = handmade()
    name = "model.layers.0.mlp.down_proj.weight"
    made.write_tensors({**made.tensors, name: made.tensors[name].to(dtype)})
    message = refusal(made.folder)
    assert name in message
    assert str(dtype) in message


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(handmade: Make, share: float) -> None:
    made = handmade()
    path = made.folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert f"{path}: not a whole safetensors file" in refusal(made.folder)
    in_a_shard = "model-00001-of-00001.safetensors"
    path.rename(made.folder / in_a_shard)
    made.write_index(dict.fromkeys(made.tensors, in_a_shard))
    assert in_a_shard in refusal(made.folder)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2**63) + b"{}",
        b"PK\x03\x04" + bytes(64),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(handmade: Make, content: bytes) -> None:
    made = handmade()
    (made.folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors: not a whole safetensors file" in refusal(made.folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert "give the GGUF file itself: tiny.gguf" in refusal(tmp_path)


def test_a_folder_without_safetensors_says_what_it_has_instead(handmade: Make) -> None:
    made = handmade()
    path = made.folder / "model.safetensors"
    path.rename(made.folder / "consolidated.safetensors")
    assert "without an index, consolidated.safetensors" in refusal(made.folder)
    (made.folder / "consolidated.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refusal(made.folder)
    torch.save({"a": torch.zeros(1)}, made.folder / "pytorch_model.bin")
    assert "pytorch_model.bin may hold pickled code, which isn't read" in refusal(made.folder)


def test_code_and_pickles_in_a_folder_are_never_run(handmade: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = handmade(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (made.folder / "modeling_evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (made.folder / "pytorch_model.bin").write_bytes(b"junk")
    monkeypatch.setattr(torch, "load", None)
    assert logits(made.folder).isfinite().all()


def test_a_path_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no-such-model: no such file or folder"):
        load_checkpoint(tmp_path / "no-such-model")
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.onnx: must be a folder .* or a file named \*\.gguf"):
        load_checkpoint(tmp_path / "model.onnx")


def test_an_unknown_dtype_names_the_known_ones(handmade: Make) -> None:
    with pytest.raises(CheckpointError, match="dtype='float64': must be one of float32, bfloat16, float16"):
        load_checkpoint(handmade().folder, "float64")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (..., ..., ()),
        (..., None, ()),
        (..., 2, (2,)),
        (..., [3, 2, 3], (3, 2)),
        (5, 2, (5,)),
        ([5, 6], 2, (5, 6)),
        (None, 2, (2,)),
        (..., 0, (0,)),
        ([5, 61, -1], 2, (5,)),
        ([], 2, ()),
    ],
)
def test_end_ids(handmade: Make, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    made = handmade()
    made.write_config(eos_token_id=config)
    if generation is not ...:
        (made.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert load_checkpoint(made.folder).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", [1, "2"], True, [[1]], 2.0, {"id": 2}])
def test_end_ids_that_are_no_integers_are_refused(handmade: Make, value: Any) -> None:
    made = handmade()
    made.write_config(eos_token_id=value)
    assert "eos_token_id=" in refusal(made.folder)
    made.write_config(eos_token_id=2)
    (made.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert "generation_config.json: eos_token_id=" in refusal(made.folder)


def test_a_broken_generation_config_is_named(handmade: Make) -> None:
    made = handmade()
    (made.folder / "generation_config.json").write_text("{")
    assert "generation_config.json: not valid JSON" in refusal(made.folder)


def test_a_folder_without_a_tokenizer_has_none(handmade: Make) -> None:
    assert read_folder(handmade().folder).tokenizer is None


def test_links_in_a_folder_are_followed(handmade: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = handmade()
    expected = logits(made.folder)
    folder = tmp_path_factory.mktemp("snapshot")
    for path in made.folder.iterdir():
        (folder / path.name).symlink_to(path)
    assert torch.equal(logits(folder), expected)


def test_metadata_of_a_file_is_no_tensor(handmade: Make) -> None:
    made = handmade()
    expected = logits(made.folder)
    metadata: Mapping[str, str] = {"format": "pt"}
    save_file(dict(made.tensors), made.folder / "model.safetensors", metadata=dict(metadata))
    assert torch.equal(logits(made.folder), expected)
