"""Compares a model's weights on disk with what its config.json calls for, reading headers and a sample of the values.

A folder of 60 GB takes seconds: SAMPLED_BYTES are divided among all tensors, and each is read at its beginning, middle
and end. Smaller tensors are read whole.
"""

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlframe.models import hub
from rlframe.models.checkpoint import INDEX, SINGLE, CheckpointReader, check_one_of_both, first_cut
from rlframe.models.config import HEAD
from rlframe.models.quantized import stated
from rlframe.models.quantized.base import TORCH, Part, Quantization, finite
from rlframe.utils.errors import CheckpointError

SAMPLED_BYTES = 256_000_000
"""Bytes read of all tensors together."""
LEAST_SAMPLED_BYTES = 4096
"""Least number of bytes read of a tensor."""
DTYPES = ("F32", "F16", "BF16")
"""Number formats that weights may have that are not quantised."""
MOST_LISTED = 5
TIED = ("model.embed_tokens.weight", "lm_head.weight")
"""The embedding and the output layer, which are one tensor in a tied model."""
HARMLESS_ENDINGS = ("rotary_emb.inv_freq",)
"""Ends of the names of tensors that follow from config.json and that old checkpoints contain."""


def model_faults(folder: Path, *, num_outputs: int | None, with_mtp: bool = False) -> list[str]:
    """Returns the faults that `faults` finds in the folder of a model.

    Args:
        num_outputs: number of outputs of the model's head, as in `Architecture`; a head that is not over the vocabulary
            may be missing.
        with_mtp: whether the head for multi-token prediction must be there, if config.json promises one.

    Raises:
        ConfigError, CheckpointError: config.json is invalid, or no family has its model_type.
    """
    family, hf = hub.load_family(folder), hub.read_config(folder)
    architecture = family.architecture(hf)
    layers = range(architecture.num_layers, architecture.num_layers + architecture.mtp_layers)
    # transformers also writes the output layer of tied models; a head replaces it.
    untied = architecture.tie_embeddings or num_outputs is not None
    ignored = {f"model.layers.{layer}." for layer in layers} | ({"lm_head.weight"} if untied else set())
    if architecture.mtp_layers:
        ignored.add("mtp.")
    found = faults(
        folder,
        family.tensors(architecture.with_outputs(num_outputs).keeping_mtp(with_mtp)),
        optional={HEAD},
        ignored=ignored,
        quantization=stated.quantization(hf),
    )
    if not found and architecture.tie_embeddings and num_outputs is None:
        found += _of_second_head(folder)
    return found


def has_mtp(folder: Path) -> bool:
    """Returns whether the folder of a model has a head for multi-token prediction that train.mtp can keep.

    Raises:
        ConfigError, CheckpointError: as `model_faults`, or the files cannot be read.
    """
    family = hub.load_family(folder)
    architecture = family.architecture(hub.read_config(folder))
    if architecture.mtp_layers != 1:
        return False
    head = family.tensors(architecture.keeping_mtp(True)).keys() - family.tensors(architecture).keys()
    return head <= set(CheckpointReader(folder).names)


def faults(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    *,
    optional: Set[str],
    ignored: Set[str],
    quantization: Quantization | None = None,
) -> list[str]:
    """Returns sentences that each name a file and a tensor. The list is empty if the weights match the model.

    Args:
        expected: shape of every tensor by its name.
        optional: tensors of `expected` that may be missing.
        ignored: further tensors that may be present, and prefixes of those of layers for multi-token prediction.
        quantization: number format that config.json states for some weights.
    """
    try:
        places = tensor_files(folder)
    except CheckpointError as error:
        return [str(error)]
    parts = dict(_parts(expected, places, quantization))
    found = _listed(
        f"{folder} lacks {{}} tensors that its config.json calls for: {{}}",
        [name for name in parts if name not in places and name not in optional],
    )
    further = quantization.ignored if quantization else ()
    found += _listed(
        f"{folder} has {{}} tensors that its config.json does not call for: {{}}; config.json is of another model, or "
        "has fewer layers or experts than the weights",
        [name for name in places if name not in parts and not _harmless(name, ignored, further, places)],
    )
    most_bytes = max(LEAST_SAMPLED_BYTES, SAMPLED_BYTES // max(1, len(parts)))
    for file in dict.fromkeys(places.values()):
        mine = {name: part for name, part in parts.items() if places.get(name) == file}
        found += _faults_of_file(file, mine, most_bytes, quantization)
    return found


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor, according to the index and checked against the files.

    Raises:
        CheckpointError: there are no weights, a file is missing, truncated or garbled, or the index does not match the
            files.
    """
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return dict.fromkeys(_names(single), single)
    stated = _weight_map(index)
    files = {file: folder / file for file in sorted(set(stated.values()))}
    check_one_of_both(folder, files.keys())
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that do not exist: {', '.join(missing[:MOST_LISTED])}")
    held = {name: file for file, path in files.items() for name in _names(path)}
    wrong = sorted(name for name in stated.keys() | held.keys() if stated.get(name) != held.get(name))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{index} is not of these files: {len(wrong)} tensors stand elsewhere, such as {name!r:.200}, for which it "
            f"says {stated.get(name, 'nothing')!r}, and which is in {held.get(name, 'none of them')!r}"
        )
    return {name: files[file] for name, file in stated.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        stated = json.loads(index.read_bytes().decode())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r:.200}") from error
    if not isinstance(stated, dict) or not stated:
        raise CheckpointError(f"{index} is not a safetensors index: its weight_map names no tensor")
    for name, file in stated.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} is not a safetensors index: {name!r:.200} must be in a .safetensors file of the folder, got "
                f"{file!r:.200}"
            )
    return stated


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        cut = first_cut(path)
        what = f"tensor {cut} cannot be read: {error}" if cut else f"cannot be read: {error}"
        raise CheckpointError(f"{path}: {what}; the file is truncated or garbled") from error


def _parts(
    expected: Mapping[str, tuple[int, ...]], places: Mapping[str, Path], quantization: Quantization | None
) -> Iterator[tuple[str, Part]]:
    """Yields every tensor that must be in the files, by its name: a weight, or what stores it."""
    for name, shape in expected.items():
        stored = quantization.stored(name, places) if quantization else (name,)
        if quantization and len(stored) > 1:
            yield from zip(stored, quantization.parts(shape), strict=True)
        else:
            yield name, Part(shape, DTYPES, finite)


def _faults_of_file(
    path: Path, expected: Mapping[str, Part], most_bytes: int, quantization: Quantization | None
) -> list[str]:
    """Returns the faults in shapes, number formats and sampled values of the tensors of one file."""
    found: dict[str, list[str]] = {"shape": [], "dtype": [], "value": []}
    with safe_open(path, framework="pt") as file:
        for name, part in expected.items():
            piece = file.get_slice(name)
            dtype, real = piece.get_dtype(), tuple(piece.get_shape())
            if dtype not in part.dtypes:
                bare = quantization.bare(name, TORCH[dtype]) if quantization and dtype in TORCH else None
                found["dtype"].append(bare or f"{name} must be of {', '.join(part.dtypes)}, got {dtype}")
            elif real != tuple(part.shape):
                found["shape"].append(f"{name} has shape {list(real)}, config.json calls for {list(part.shape)}")
            elif part.sound and not all(map(part.sound, _samples(piece, real, most_bytes // TORCH[dtype].itemsize))):
                found["value"].append(name)
    return [
        *_listed(f"{path}: {{}} tensors are of another shape: {{}}", found["shape"]),
        *_listed(f"{path}: {{}} tensors are in another number format: {{}}", found["dtype"]),
        *_listed(f"{path}: {{}} tensors hold NaN or infinity: {{}}; the file is garbled", found["value"]),
    ]  # fmt: skip


def _of_second_head(folder: Path) -> list[str]:
    """Returns a fault if the weights of a tied model have an output layer that is not its embedding."""
    places = tensor_files(folder)
    if not places.keys() >= {*TIED}:
        return []
    most = max(LEAST_SAMPLED_BYTES, SAMPLED_BYTES // len(places))
    with safe_open(places[TIED[0]], framework="pt") as first, safe_open(places[TIED[1]], framework="pt") as second:
        pieces = first.get_slice(TIED[0]), second.get_slice(TIED[1])
        embedding, head = (tuple(piece.get_shape()) for piece in pieces)
        if embedding == head:
            samples = zip(*(_samples(piece, head, most // 4) for piece in pieces), strict=True)
            if all(torch.equal(one.float(), other.float()) for one, other in samples):
                return []
    return [
        f"{places[TIED[1]]}: {TIED[1]} is not {TIED[0]}, which by the tie_word_embeddings of config.json is the output "
        "layer: set it to false if both were trained, or remove the tensor"
    ]


def _samples(piece: Any, shape: tuple[int, ...], most: int) -> Iterator[torch.Tensor]:
    """Yields at most about `most` values of a tensor: all, or a third each from its beginning, middle and end."""
    count = 1
    for size in shape:
        count *= size
    if count <= most:
        yield piece[...]
        return
    # All axes except those that a third of the values can span are held at one index.
    third, axis, inner = max(1, most // 3), len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= third:
        inner *= shape[axis]
        axis -= 1
    length = max(1, third // inner)
    for part in (0.0, 0.5, 1.0):
        start = int((shape[axis] - length) * part) if shape[axis] > length else 0
        outer = tuple(slice(int((size - 1) * part), int((size - 1) * part) + 1) for size in shape[:axis])
        yield piece[(*outer, slice(start, start + length))]


def _harmless(name: str, ignored: Set[str], endings: tuple[str, ...], places: Mapping[str, Path]) -> bool:
    if name.endswith(HARMLESS_ENDINGS + endings) or name in ignored:
        return True
    # A tensor that only a layer for multi-token prediction has: it joins a state with an embedding.
    return any(
        name.startswith(prefix) and not {f"{prefix}eh_proj.weight", f"{prefix}fc.weight"}.isdisjoint(places)
        for prefix in ignored
    )


def _listed(sentence: str, items: list[str]) -> list[str]:
    """Returns the sentence with the count and the first items, or nothing if there are none."""
    if not items:
        return []
    more = f" and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return [sentence.format(len(items), ", ".join(items[:MOST_LISTED]) + more)]
