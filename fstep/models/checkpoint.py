"""Checkpoints of models, read from a Hugging Face folder or a GGUF file: never pickle, never code from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from attrs import frozen

from fstep.models.tokenizer import Tokenizer
from fstep.state import CheckpointError, Kernels, Model, Tree


@frozen(eq=False)
class Checkpoint:
    """A model that is ready to run."""

    model: Model
    params: Tree
    eos_token_ids: tuple[int, ...]  #: ids that end a request; () if the checkpoint names none
    tokenizer: Tokenizer | None  #: None if the checkpoint has none


def load_checkpoint(path: str | Path, dtype: str = "float32") -> Checkpoint:
    """Reads a folder with config.json and safetensors, or a file that ends in .gguf.

    `dtype` ("float32", "bfloat16", "float16") is that of the parameters, whatever the file has. Nothing is
    downloaded. Raises `CheckpointError` naming the file and what is wrong with it.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        from fstep.models.hf import read_folder  # the readers need packages of the extra "hf", models don't

        return read_folder(path, dtype)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder (checkpoints are read from disk, not downloaded)")
    if path.suffix.lower() == ".gguf":
        from fstep.models.gguf import read_gguf

        return read_gguf(path, dtype)
    raise CheckpointError(f"{path}: must be a folder with config.json and safetensors files, or a file named *.gguf")


def placed(params: Tree, kernels: Kernels) -> Tree:
    """The same parameters, every matrix that is named "weight" in the form in which `kernels.linear` reads it best."""

    def place(name: str, node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: place(key, value) for key, value in cast(Tree, node).items()}
        if isinstance(node, tuple):
            return tuple(place(name, value) for value in cast(tuple[Any, ...], node))
        return kernels.weight(node) if name == "weight" else node

    return place("", params)
