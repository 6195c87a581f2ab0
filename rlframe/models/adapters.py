"""LoRA adapters in PEFT's file format, and the initial values of new ones.

A folder has `adapter_config.json` and `adapter_model.safetensors`. For the matrix `model.layers.0.mlp.up_proj.weight`,
[out, in], the file holds `base_model.model.model.layers.0.mlp.up_proj.lora_A.weight`, [rank, in], and `.lora_B.weight`,
[out, rank]; a tensor trained in full keeps its name behind `base_model.model.`. Matrices of experts are named one by
one, as the checkpoint names them. PEFT names what it finds in the class of the base model: where that has no head, as
for embeddings, names have no `model.` in them. The model's weight is W + scaling B A, with scaling = lora_alpha / r, or
lora_alpha / sqrt(r) where use_rslora is set. Source: PEFT's documentation, "PEFT checkpoint format".
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlframe.models.checkpoint import save
from rlframe.models.config import HEAD
from rlframe.models.inspection import TIED
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files.whole import whole_file, write_whole

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
BODY = f"{PREFIX}model."
"""Beginning of the names of a model below its head; PREFIX where the class of the base has no head."""
HALVES = ("lora_A", "lora_B")
OF_ADAPTER_ALONE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the base as it is. PEFT 0.21 takes the first B A of the others out of it
whenever it loads such an adapter, which is why PEFT can convert one when it saves it."""
VARIANTS = ("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config",
            "use_bdlora", "use_qalora")  # fmt: skip
"""Settings with which PEFT computes something else than W + s B A."""


def key(tensor: str, half: str | None = None) -> str:
    """Returns PEFT's name of A or B (`half` is lora_A or lora_B) of a matrix, or of a tensor that is trained in
    full."""
    return PREFIX + (f"{tensor.removesuffix('.weight')}.{half}.weight" if half else tensor)


def initial(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Returns a new A or B, float32 on the CPU: B is zeros, A is uniform in +-1 / sqrt(in).

    These are PEFT's values: Kaiming-uniform with a = sqrt(5) has the bound gain * sqrt(3 / in) with gain = sqrt(2 / (1
    + a^2)) = sqrt(1 / 3). A depends on nothing but its name, its shape and the seed, so every rank of every layout can
    cut its part from the same matrix.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(shape[1])


def write(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    base: str,
    model_tensors: Iterable[str],
    rank: int,
    alpha: float,
    rslora: bool,
    dropout: float,
    tied: bool = False,
    headless: bool = False,
) -> None:
    """Writes an adapter that `peft.PeftModel.from_pretrained` loads. Each file gets its final name only after it is
    complete. Of a tied model an embedding that is trained in full is written as the output layer too: PEFT replaces
    what is trained in full by a copy, and the output layer would stay that of the base.

    Args:
        tensors: by PEFT's names, whole.
        base: name or folder of the base model.
        model_tensors: every tensor of the base model's checkpoint.
        tied: whether the output layer of the base model is its embedding.
        headless: whether the model has no head, so that transformers' class for it is AutoModel's. Where PEFT would
            take further modules for one that is trained in full, the file is of the class with a head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.contiguous() for name, tensor in tensors}
    if headless := headless and _distinct(held, map(key, model_tensors := list(model_tensors))):
        held = {_without_head(name): tensor for name, tensor in held.items()}
        model_tensors = [_without_head(key(name)).removeprefix(PREFIX) for name in model_tensors]
    embedding, output = map(key, TIED)
    if tied and embedding in held:
        held[output] = held[embedding].clone()
    modules = sorted({name.removeprefix(PREFIX).rpartition(".lora_A.")[0] for name in held if ".lora_A." in name})
    saved = sorted(
        {
            name.removeprefix(PREFIX).rpartition(".")[0]
            for name in held
            if not any(f".{half}." in name for half in HALVES)
        }
    )
    config = {
        "peft_type": "LORA",
        "task_type": _task(saved, headless=headless),
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": _endings(modules, [name.rpartition(".")[0] for name in model_tensors]),
        "modules_to_save": saved or None,
    }
    with whole_file(folder / WEIGHTS) as aside:
        save(held, aside)
    write_whole(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def _task(saved: list[str], *, headless: bool) -> str:
    """Returns PEFT's name of what the model is for, by which it chooses the class of the base."""
    if headless:
        return "FEATURE_EXTRACTION"
    return "SEQ_CLS" if HEAD.removesuffix(".weight") in saved else "CAUSAL_LM"


def _distinct(held: Iterable[str], everything: Iterable[str]) -> bool:
    """Returns whether, without a head, no name of a tensor trained in full ends that of another: PEFT 0.21 compares the
    ends of modules_to_save without a dot, so that norm is q_norm too."""
    whole = {
        _without_head(name).removeprefix(PREFIX) for name in held if not any(f".{half}." in name for half in HALVES)
    }
    others = {_without_head(name).removeprefix(PREFIX) for name in everything}
    return not any(other != name and other.endswith(name) for name in whole for other in others)


def _without_head(name: str) -> str:
    """Returns the name of a tensor where the class of the base has no head."""
    return PREFIX + name.removeprefix(BODY) if name.startswith(BODY) else name


def _endings(modules: list[str], everything: Iterable[str]) -> list[str]:
    """Returns the modules as PEFT's target_modules: by their last word if all modules with that word are meant, in full
    otherwise."""
    left_out = {name.rpartition(".")[2] for name in set(everything) - set(modules)}
    words = [name.rpartition(".")[2] for name in modules]
    return sorted({name if word in left_out else word for name, word in zip(modules, words, strict=True)})


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of adapter_config.json.

    Raises:
        CheckpointError: the file is missing, not JSON, or describes no LoRA adapter.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist, so {folder} is not an adapter in PEFT format") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} must describe a LoRA adapter: peft_type must be LORA")
    return config


def faults(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    *,
    rank: int,
    alpha: float,
    rslora: bool,
    tied: bool = False,
) -> list[str]:
    """Returns why the adapter in `folder` does not match these settings, as clauses whose subject is the adapter.

    Args:
        expected: shape of every tensor by PEFT's name.
        tied: see `write`.

    Raises:
        CheckpointError: as `read_config`, or the weights cannot be read.
    """
    config = read_config(folder)
    wanted = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora, "bias": "none", "use_dora": False}
    absent = {"r": 8, "lora_alpha": 8, "use_rslora": False, "bias": "none", "use_dora": False}
    found = [
        f"has {name} = {config.get(name, absent[name])!r}, train.lora says {value!r}"
        for name, value in wanted.items()
        if config.get(name, absent[name]) != value
    ]
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        found.append("has rank_pattern or alpha_pattern, which are not supported: one rank and alpha for all")
    if (start := config.get("init_lora_weights")) not in OF_ADAPTER_ALONE:
        found.append(f"has init_lora_weights = {start!r:.60}, which changes the base too: have PEFT convert it")
    found += [f"has {name}, which is not supported" for name in VARIANTS if config.get(name)]
    with _opened(folder) as file:
        names: list[str] = list(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    own = {_without_head(name): name for name in expected if name not in shapes}
    shapes = {own.get(name, name): shape for name, shape in shapes.items()}
    embedding, output = map(key, TIED)
    copied = tied and shapes.keys() >= {embedding, output}
    if copied and torch.equal(read(folder, embedding), read(folder, output)):
        del shapes[output]
    for verb, odd in (("lacks", expected.keys() - shapes.keys()), ("also has", shapes.keys() - expected.keys())):
        if odd:
            found.append(f"{verb} {len(odd)} tensors by the settings' target_modules, such as {min(odd)}")
    found += [
        f"has {name} of shape {list(shapes[name])}, the model expects {list(shape)}"
        for name, shape in sorted(expected.items())
        if shapes.get(name, shape) != tuple(shape)
    ][:3]
    return found


def read(folder: Path, name: str) -> Tensor:
    """Returns a tensor of an adapter, as stored, also of one for a class without a head.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    with _opened(folder) as file:
        alone = _without_head(name)
        try:
            return file.get_tensor(alone if name not in file.keys() and alone in file.keys() else name)  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{folder / WEIGHTS}: tensor {name} cannot be read: {error}") from error


def _opened(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {error}") from error
