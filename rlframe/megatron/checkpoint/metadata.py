"""The `.metadata` of a distributed checkpoint, a pickle, read without running code that it names.

torch and Megatron write dataclasses, sizes and dtypes there. The unpickler accepts only their names, and maps them to
stand-ins that store their arguments. The real objects are built from these, field by field. Any other name is refused
before anything is called, so that a planted file can do no more than be wrong.
"""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rlframe.utils.errors import CheckpointError

METADATA = ".metadata"
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Megatron keeps the plans of all ranks beside it; they are read and left aside.
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
    # torch before 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
}  # fmt: skip
"""Names that become records, by module."""
RECIPES = "transformer_engine.common.recipe"
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an entry, with the fields that torch's `FileSystemReader` reads."""

    relative_path: str
    """Name of the file in the checkpoint's folder."""
    offset: int
    length: int
    """Number of bytes."""
    transform_descriptors: None = None
    """Transformations of the bytes. Transformed entries are refused."""


class Record:
    """The description of an object in a pickle, without the object."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> "Record":
        """Stores the arguments of the class."""
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Accepts only the names above. Each file gets new stand-ins, so that no change to them outlives it."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self._known: dict[tuple[str, str], Any] = {
            (module, name): type(name, (Record,), {}) for module, names in RECORDS.items() for name in names
        }
        self._known |= {("torch", name): dtype for name, dtype in DTYPES.items()}
        self._known |= {
            ("torch", "Size"): torch.Size,
            ("torch.serialization", "_get_layout"): lambda name: torch.strided,
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
            ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
            ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a name.

        Raises:
            UnpicklingError: no file of this kind needs the name.
        """
        try:
            return self._known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no such file needs and which could run code; nothing was run"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        """Refuses external objects."""
        raise pickle.UnpicklingError(f"it refers to {pid!r:.80}, which no such file does")


def read_metadata(folder: Path) -> Metadata:
    """Returns the `.metadata` of a checkpoint. Nothing that it names is imported or called.

    Raises:
        CheckpointError: the file is missing, garbled, or has names that it does not need.
    """
    path = folder / METADATA
    try:
        return _metadata(_Unpickler(path.read_bytes()).load())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (
        pickle.UnpicklingError,
        AttributeError,
        EOFError,
        IndexError,
        KeyError,
        MemoryError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:  # what C's unpickler raises on garbage, and what is raised below where a field is missing
        raise CheckpointError(
            f"{path} is not the metadata of a distributed checkpoint: {error or type(error).__name__}"
        ) from error  # fmt: skip


def _metadata(record: Any) -> Metadata:
    fields = _fields(record, "Metadata")
    stored = {_index(index): _place(place) for index, place in _dict(fields["storage_data"]).items()}
    return Metadata(
        state_dict_metadata={_text(name): _stored(each) for name, each in _dict(fields["state_dict_metadata"]).items()},
        storage_data=stored,
        storage_meta=StorageMeta(),
    )


def _stored(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_dtype(fields["properties"])),
        size=_size(fields["size"]),
        chunks=[_chunk(chunk) for chunk in _kind(fields["chunks"], list)],
    )


def _chunk(record: Any) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    return ChunkStorageMetadata(offsets=_size(fields["offsets"]), sizes=_size(fields["sizes"]))


def _dtype(record: Any) -> torch.dtype:
    """Returns the first of the five values of TensorProperties; torch deprecates the others."""
    state = _state(record, "TensorProperties")
    return _kind(state["dtype"] if isinstance(state, dict) else _kind(state, tuple)[0], torch.dtype)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, hint = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        None if offset is None else _size(offset),
        None if hint is None else _kind(hint, int),
    )


def _place(record: Any) -> Place:
    fields = _fields(record, "_StorageInfo")
    name = _text(fields["relative_path"])
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"the file {name!r:.80} is not in the checkpoint's folder")
    if fields.get("transform_descriptors"):
        raise ValueError(f"the entries of {name} were transformed when they were written, which is not supported")
    return Place(name, _kind(fields["offset"], int), _kind(fields["length"], int))


def _fields(record: Any, name: str) -> dict[str, Any]:
    return _dict(_state(record, name))


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, Record) or type(record).__name__ != name:
        raise ValueError(f"{record!r:.80} where a {name} belongs")
    return record.state


def _size(value: Any) -> torch.Size:
    if not all(type(axis) is int and axis >= 0 for axis in _kind(value, tuple)):
        raise ValueError(f"{value!r:.80} where lengths of axes belong")
    return torch.Size(value)


def _dict(value: Any) -> dict[Any, Any]:
    return _kind(value, dict)


def _text(value: Any) -> str:
    return _kind(value, str)


def _kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r:.80} where a {kind.__name__} belongs")
    return value


class _ExtraState(_Unpickler):
    """Checks the FP8 state of a module of Transformer Engine, which Transformer Engine will unpickle itself."""

    def __init__(self, content: bytes):
        super().__init__(content)

        def tensor_from(inner: bytes) -> Any:
            return torch.load(io.BytesIO(inner), weights_only=True)

        self._known |= {
            ("torch._utils", "_rebuild_tensor_v2"): lambda *_: None,
            ("torch.storage", "_load_from_bytes"): tensor_from,
            # Megatron-Core 0.19 puts its own function in the place of torch's; 0.16 cannot load what has this name.
            ("megatron.core.safe_globals", "safe_load_from_bytes"): tensor_from,
        }

    def find_class(self, module: str, name: str) -> Any:
        """Returns the stand-in for a name that such a state has."""
        if module == RECIPES and name.isidentifier():
            return type(name, (Record,), {})
        return super().find_class(module, name)


def require_plain(content: bytes, *, name: str) -> None:
    """Raises CheckpointError unless the pickle `content`, of the entry `name`, holds numbers, tensors and FP8 recipes
    only, so that Transformer Engine may unpickle it."""
    try:
        _ExtraState(content).load()
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the state of {name} is not one of Transformer Engine's: {error}") from error
