"""Checkpoints in the folder format of Hugging Face: config.json beside safetensors files."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fstep.models.checkpoint import Checkpoint
from fstep.models.dense import EMBEDDINGS, LM_HEAD, DenseConfig, DenseDecoder, assemble
from fstep.models.hf_config import Fields, dense_config, located
from fstep.models.tokenizer import tokenizer_from_folder
from fstep.state import CheckpointError, Tree

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def read_folder(folder: Path, dtype: str = "float32") -> Checkpoint:
    """The checkpoint in `folder`: config.json with model.safetensors, or with shards and their index.

    End ids come from generation_config.json, else from config.json. Raises `CheckpointError` naming the file, and the
    tensor or field.
    """
    fields = Fields.read(_config_path(folder))
    config = dense_config(fields, dtype)
    with _opened(folder) as weights:
        params = _params(config, weights)
    return Checkpoint(
        DenseDecoder(config), params, eos_token_ids(folder, fields, config.vocab_size), tokenizer_from_folder(folder)
    )


def _config_path(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.exists():
        gguf = ", ".join(sorted(found.name for found in folder.glob("*.gguf")))
        raise CheckpointError(
            f"{folder}: has no config.json" + (f"; give the GGUF file itself: {gguf}" if gguf else "")
        )
    return path


def eos_token_ids(folder: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a request; those outside the vocabulary, which some files have, can't be drawn: left out."""
    path = folder / "generation_config.json"
    for fields in ([Fields.read(path)] if path.exists() else []) + [config]:
        value = fields.values.get("eos_token_id")
        if value is None:
            continue
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise fields.error("eos_token_id", "must be an integer or a list of integers")
        return tuple(dict.fromkeys(each for each in cast("list[int]", ids) if 0 <= each < vocab_size))
    return ()


@frozen(eq=False)
class _Weights:
    """The tensors of a folder: which file has each, and those files, open."""

    folder: Path
    file_of: Mapping[str, str]
    open_files: Mapping[str, Any]

    def read(self, name: str) -> Tensor:
        """One tensor, still in the file's memory map."""
        path = self.folder / self.file_of[name]
        try:
            tensor = self.open_files[self.file_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} can't be read: {error}") from None
        if tensor.dtype not in _READABLE:
            raise CheckpointError(f"{path}: tensor {name}: has type {tensor.dtype}, which isn't a plain float")
        return tensor


@contextmanager
def _opened(folder: Path) -> Generator[_Weights]:
    file_of = _files(folder)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name in sorted(set(file_of.values()) if file_of is not None else {SINGLE}):
            files[name] = stack.enter_context(_open(folder / name))
        yield _Weights(folder, _located_tensors(folder, file_of, files), files)


def _files(folder: Path) -> Mapping[str, str] | None:
    """The file of each tensor as the index has it; None for a single file without an index."""
    if (folder / INDEX).exists():
        return _indexed(folder)
    if (folder / SINGLE).exists():
        return None
    raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}{_what_else(folder)}")


def _what_else(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"; without an index, {', '.join(shards)} can't be told apart"
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled:
        return f"; {', '.join(pickled)} may hold pickled code, which isn't read: save the weights as safetensors"
    return ""


def _indexed(folder: Path) -> Mapping[str, str]:
    fields = Fields.read(folder / INDEX)
    file_of: dict[str, str] = {}
    for tensor, name in fields.object("weight_map").values.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{folder / INDEX}: weight_map: {tensor}={name!r}: must be a file name in the folder")
        file_of[tensor] = name
    if not file_of:
        raise CheckpointError(f"{folder / INDEX}: weight_map is missing or empty")
    missing = sorted(name for name in set(file_of.values()) if not (folder / name).exists())
    if missing:
        raise CheckpointError(f"{folder}: {INDEX} names files that aren't there: {', '.join(missing)}")
    return file_of


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from None


def _located_tensors(folder: Path, file_of: Mapping[str, str] | None, files: Mapping[str, Any]) -> Mapping[str, str]:
    if file_of is None:
        return dict.fromkeys(files[SINGLE].keys(), SINGLE)
    within = {name: frozenset(file.keys()) for name, file in files.items()}
    absent = sorted(f"{tensor} ({name})" for tensor, name in file_of.items() if tensor not in within[name])
    if absent:
        raise CheckpointError(f"{folder}: {INDEX} names tensors that their files lack: {', '.join(absent)}")
    return file_of


def _params(config: DenseConfig, weights: _Weights) -> Tree:
    """The parameter tree, in memory of its own."""
    sources = _sources(config, weights)

    def read(name: str) -> Tensor:
        return weights.read(sources[name]).to(config.torch_dtype, copy=True)

    try:
        return assemble(config, sources, read)
    except CheckpointError as error:
        raise located(error, str(weights.folder)) from None


def _sources(config: DenseConfig, weights: _Weights) -> Mapping[str, str]:
    """The name in the files of each tensor that `assemble` is offered, by its own.

    Tied embeddings may stand under either name, or under both if they are the same.
    """
    worked_out = ".rotary_emb.inv_freq"  # a buffer that old files carry
    sources = {name: name for name in weights.file_of if not name.endswith(worked_out)}
    both = LM_HEAD in sources and EMBEDDINGS in sources
    if config.tie_word_embeddings and sources.pop(LM_HEAD, None):
        sources.setdefault(EMBEDDINGS, LM_HEAD)
        if both:
            _check_tied(weights)
    return sources


def _check_tied(weights: _Weights) -> None:
    if not torch.equal(weights.read(EMBEDDINGS), weights.read(LM_HEAD)):
        raise CheckpointError(
            f"{weights.folder}: tie_word_embeddings=True, but {LM_HEAD} isn't the same as {EMBEDDINGS}; "
            "config.json has to say which"
        )
