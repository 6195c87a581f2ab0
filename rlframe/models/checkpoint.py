"""Hugging Face checkpoints on disk: one safetensors file, or several with an index. Quantised weights are read as what
they stand for (`rlframe.models.quantized`)."""

import json
import re
import shutil
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlframe.models.chat_template import MORE
from rlframe.models.hub import read_json
from rlframe.models.quantized import stated
from rlframe.models.tokenizer import load as load_tokenizer
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.whole import put, write_whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
SIDECAR_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}
"""Names of the files next to the weights: config, tokenizer, chat template, and code that those name."""
LEFT = ("config.json", "adapter_config.json")
"""Names of files that are written anew, and of an adapter's, which transformers would load on top of the weights."""


class CheckpointReader:
    """The tensors of a folder, read one at a time. A weight that is stored as values and scales is one tensor, in the
    number format in which config.json says that the model computes.

    Raises:
        CheckpointError: the folder has no safetensors files, or a file named in the index is missing.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file_of = _files_by_tensor(folder)
        missing = sorted({str(path) for path in self._file_of.values() if not path.is_file()})
        if missing:
            raise CheckpointError(f"{folder / INDEX} names files that do not exist: {', '.join(missing)}")
        hf = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        self._quantization = stated.quantization(hf)
        self._dtype = stated.dtype(hf) if self._quantization else None

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return self._quantization.names(list(self._file_of)) if self._quantization else sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading the tensor."""
        stored, *scales = self._stored(name)
        path = self._path(stored)
        try:
            with safe_open(path, framework="pt") as file:
                found = tuple(file.get_slice(stored).get_shape())
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, stored, error) from error
        return self._quantization.shape(found) if self._quantization and scales else found

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor as stored, or a quantised weight as what it stands for.

        Raises:
            CheckpointError: there is no such tensor, its file is truncated or garbled, or its scales are missing.
        """
        names = self._stored(name)
        stored = [self._as_stored(each) for each in names]
        if self._quantization is None or self._dtype is None:
            return stored[0]
        if len(stored) == 1:
            if fault := self._quantization.bare(name, stored[0].dtype):
                raise CheckpointError(f"{self._path(name)}: {fault}")
            return stored[0]
        try:
            return self._quantization.read(names, stored, self._dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error

    def _as_stored(self, name: str) -> Tensor:
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, name, error) from error

    def _stored(self, name: str) -> tuple[str, ...]:
        return self._quantization.stored(name, self._file_of) if self._quantization else (name,)

    def _path(self, name: str) -> Path:
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder} has no tensor {name}")
        return self._file_of[name]


def write_checkpoint(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Streams `tensors` into safetensors files of at most `max_shard_bytes` each, plus an index if there are several.

    Files get their final names only after they are complete, the index last; then weights of an earlier export are
    removed. The memory of a tensor may be reused after the next one has been requested.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = 0
    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(folder, len(shards), pending))
            pending, pending_bytes = {}, 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
    shards.append(_write_shard(folder, len(shards), pending))
    _publish(folder, shards)


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes one safetensors file, which whoever may read other new files may read. safetensors 0.8 itself leaves it to
    the user who wrote it, whatever umask says."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def copy_sidecars(source: Path, folder: Path, *, dtype: torch.dtype, num_outputs: int | None = None) -> None:
    """Copies config and tokenizer files of the model in `source`; the config's dtype becomes `dtype`, and its weights
    are no longer quantised. Creates a generation config if there is none.

    Args:
        num_outputs: `Architecture.num_outputs` of the model; the config then names transformers' class for such a head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in SIDECAR_SUFFIXES and not path.name.endswith(".index.json") and path.name not in LEFT:
            shutil.copyfile(path, folder / path.name)
    if (source / MORE).is_dir():
        shutil.copytree(source / MORE, folder / MORE, dirs_exist_ok=True)
    hf = stated.without(json.loads((source / "config.json").read_text()))
    # transformers 5 writes dtype, and reads it first; older versions wrote, and only read, torch_dtype.
    for key in {"dtype", "torch_dtype"} & hf.keys() or {"dtype"}:
        hf[key] = str(dtype).removeprefix("torch.")
    if num_outputs is not None:
        hf |= _class_of(source, hf, num_outputs)
    _write_json(folder / "config.json", hf)
    if not (source / GENERATION).is_file():
        _write_json(folder / GENERATION, _generation_config(source, hf))


def _class_of(source: Path, hf: dict[str, Any], num_outputs: int) -> dict[str, Any]:
    """Returns the entries of config.json for a model with a head of `num_outputs`, or without a head if that is 0."""
    kind = "ForSequenceClassification" if num_outputs else "Model"
    changed: dict[str, Any] = {
        "architectures": [re.sub(r"(For[A-Z]\w*|Model)$", "", name) + kind for name in hf.get("architectures") or ()]
    }
    if hf.get("pad_token_id") is None:
        # transformers finds the last token of a sequence by looking for padding.
        changed["pad_token_id"] = _generation_config(source, hf).get("pad_token_id")
    if num_outputs and len(hf.get("id2label") or ()) != num_outputs:
        changed["id2label"] = {str(index): f"LABEL_{index}" for index in range(num_outputs)}
        changed["label2id"] = {name: int(index) for index, name in changed["id2label"].items()}
    return changed


def _generation_config(source: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the special tokens that config.json and the tokenizer state. If both state one, the tokenizer's counts,
    but text ends at either. This follows transformers 5's `trainer_utils.align_special_tokens`."""
    stated = {**(hf.get("text_config") or {}), **{key: value for key, value in hf.items() if value is not None}}
    tokenizer = None
    if (source / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(source)
    found: dict[str, Any] = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = stated.get(key)
        values = [getattr(tokenizer, key, None), *(own if isinstance(own, list) else [own])]
        values = list(dict.fromkeys(value for value in values if value is not None))
        if values:
            found[key] = values if key == "eos_token_id" and len(values) > 1 else values[0]
    return found


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        try:
            found = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        check_one_of_both(folder, {path.name for path in found.values()})
        return found
    if not single.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError) as error:
        if first_cut(single):
            raise _unreadable(single, "", error) from error
        raise CheckpointError(f"{single} cannot be read: {error}; it is truncated or not a safetensors file") from error


def check_one_of_both(folder: Path, named: Set[str]) -> None:
    """Raises CheckpointError if the folder has one file of weights beside the files that its index names: transformers
    reads the first, vLLM the others.

    Args:
        named: names of the files in the index.
    """
    if SINGLE not in named and (folder / SINGLE).is_file():
        raise CheckpointError(
            f"{folder} has {SINGLE}, and {INDEX}, which names other files: libraries differ in which they read; remove "
            "the one that is not the model's"
        )


def _unreadable(path: Path, name: str, error: Exception) -> CheckpointError:
    name = first_cut(path) or name
    return CheckpointError(f"{path}: tensor {name} cannot be read: {error}; the file is truncated or garbled")


def first_cut(path: Path) -> str | None:
    """Returns the first tensor whose data the file ends before, if the file's header can be read."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            present = path.stat().st_size - 8 - size
            header = json.loads(file.read(size)) if present >= 0 else {}
        places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return min(((start, name) for name, (start, end) in places.items() if end > present), default=(0, None))[1]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _temporary(folder: Path, shard: int) -> Path:
    return folder / f".model-{shard:05d}.safetensors.partial"


def _write_shard(folder: Path, shard: int, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Writes a shard and returns the bytes of each tensor, by name."""
    save(tensors, _temporary(folder, shard))
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _publish(folder: Path, shards: list[dict[str, int]]) -> None:
    """Renames the complete shards, writes the index last, and removes files of an earlier export."""
    count = len(shards)
    final = [SINGLE] if count == 1 else [f"model-{shard + 1:05d}-of-{count:05d}.safetensors" for shard in range(count)]
    for shard, name in enumerate(final):
        put(_temporary(folder, shard), folder / name)
    if count > 1:
        weight_map = {name: final[shard] for shard, names in enumerate(shards) for name in names}
        total_size = sum(sum(names.values()) for names in shards)
        _write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for path in folder.glob("model*.safetensors"):
        if path.name not in final:
            path.unlink()


def _write_json(path: Path, value: object) -> None:
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())
