"""Tiny checkpoints with random weights: written by transformers, which is the oracle, or straight from the names."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import save_file
from torch import Tensor

from fstep.models.dense import tensor_shapes
from fstep.models.hf_config import Fields, dense_config

TINY: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_STRETCHED: Mapping[str, Any] = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3: Mapping[str, Any] = {**_STRETCHED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN: Mapping[str, Any] = {**_STRETCHED, "rope_type": "yarn"}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-all-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 6}),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-one-kv-head": ("Mistral", {"num_key_value_heads": 1, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": (
        "Qwen2",
        {"rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 2.0, "beta_slow": 0.5}},
    ),
    "qwen2-yarn-untruncated": (
        "Qwen2",
        {"rope_parameters": {**_YARN, "attention_factor": 1.25, "truncate": False, "beta_fast": 3.0}},
    ),
    "qwen3": ("Qwen3", {"hidden_size": 24, "head_dim": 16}),
    "qwen3-tied-biases": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
}


@frozen(eq=False)
class Oracle:
    """A checkpoint that transformers wrote, and the model that wrote it."""

    folder: Path
    model: Any

    def logits(self, prompt: list[int]) -> Tensor:
        """`[len(prompt), V]`."""
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return self.model(torch.tensor([prompt])).logits[0].float()

    def read_as(self, dtype: torch.dtype) -> Oracle:
        """The model as transformers reads it from the folder, in another dtype."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = type(self.model).from_pretrained(self.folder, dtype=dtype, attn_implementation="eager")
        return Oracle(self.folder, model.eval())


@pytest.fixture(scope="session")
def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return transformers


def randomize(model: Any, seed: int) -> None:
    """Weights, norms and biases far from what a model is born with, so that mistaking any of them shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)


@pytest.fixture(scope="session")
def build(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Oracle]:
    """Makes the checkpoint of an architecture with other fields than `TINY`'s."""

    def make(architecture: str, save: Mapping[str, Any] | None = None, dtype: str = "float32", **fields: Any) -> Oracle:
        folder = tmp_path_factory.mktemp(architecture)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(transformers, f"{architecture}Config")(**{**TINY, **fields}, attn_implementation="eager")
            model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
            randomize(model, seed=7)
            model.to(getattr(torch, dtype)).save_pretrained(folder, **(save or {}))
        return Oracle(folder, model)

    return make


@pytest.fixture(scope="session")
def oracle(build: Callable[..., Oracle]) -> Callable[[str], Oracle]:
    """The checkpoint of one of `ARCHITECTURES`, made once."""
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            architecture, fields = ARCHITECTURES[name]
            made[name] = build(architecture, **fields)
        return made[name]

    return get


@frozen(eq=False)
class Handmade:
    """A checkpoint folder whose every byte a test decides."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def write_config(self, **changes: Any) -> None:
        """config.json with some fields changed; `...` takes a field out."""
        fields = {name: value for name, value in {**self.config, **changes}.items() if value is not ...}
        (self.folder / "config.json").write_text(json.dumps(fields))

    def write_tensors(self, tensors: Mapping[str, Tensor], name: str = "model.safetensors") -> None:
        save_file(dict(tensors), self.folder / name)

    def write_index(self, file_of: Mapping[str, str]) -> None:
        text = json.dumps({"metadata": {}, "weight_map": dict(file_of)})
        (self.folder / "model.safetensors.index.json").write_text(text)


@pytest.fixture
def handmade(tmp_path: Path) -> Callable[..., Handmade]:
    """A whole checkpoint of one file, for a test to damage."""

    def make(model_type: str = "llama", **fields: Any) -> Handmade:
        config = {"model_type": model_type, **TINY, "num_hidden_layers": 2, **fields}
        shapes = tensor_shapes(dense_config(Fields("config.json", config)))
        generator = torch.Generator().manual_seed(3)
        tensors = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        made = Handmade(tmp_path, config, tensors)
        made.write_config()
        made.write_tensors(tensors)
        return made

    return make
