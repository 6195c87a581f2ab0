"""The layouts of SGLang's ranks, recorded from SGLang's own loader in one process; see `simulated_ranks`.

Some of SGLang's choices depend on the device it finds, and here there is none. Choices of its CPU path (it pads the
width of experts to a multiple of 32 * tp) are left out, because the layouts must hold on GPUs. Choices that need CUDA
cannot be seen: there the shared experts of GLM-4.5 become further routed experts, of the same bytes.
"""

import importlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.served.plain import overrides_of
from rlframe.rollout.served.quantized import formats, shapes, stated_format
from rlframe.rollout.served.simulated_ranks import SimulatedGroup, record_ranks, split_faults, without_memory
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout


def prepare() -> None:
    """Imports the modules that recording needs.

    Raises:
        ConfigError: SGLang is not installed, or cannot be imported on this machine.
    """
    # A recording reports through its errors; SGLang would log every model that it cannot import here.
    logging.getLogger("sglang").setLevel(logging.ERROR)
    try:
        for name in ("server_args", "runtime_context", "model_loader.loader"):
            importlib.import_module(f"sglang.srt.{name}")
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise _not_here(error) from error
        raise ConfigError(
            [
                Fault(
                    "rollout.name",
                    got="sglang",
                    stated=True,
                    said="the package sglang is not installed: pip install 'rlframe[sglang]'",
                )
            ]
        ) from error
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        raise _not_here(error) from error


def _not_here(error: Exception) -> ConfigError:
    return ConfigError(
        [
            f"rollout.name=sglang: SGLang is installed, but its import fails here ({error}); record its "
            "layouts on a machine where it works, such as one with a GPU (which is not used)"
        ]
    )


def faults(architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Returns a fault for every reason why SGLang cannot split this model."""
    found = split_faults("sglang", architecture, tp=tp, ep=ep)
    name, num_experts = architecture.model_type, architecture.num_experts
    # vLLM gives the first ranks one expert more; SGLang asserts that the experts divide evenly.
    if ep and num_experts % tp:
        found.append(
            Fault(
                "rollout.name",
                got="sglang",
                stated=True,
                said=f"tp {tp} must divide num_experts {num_experts} of {name} with ep",
            )
        )
    return found


def engine_layouts(
    folder: Path,
    *,
    dtype: torch.dtype,
    tp: int = 1,
    ep: bool = False,
    engine_format: EngineFormat = EngineFormat.NONE,
) -> list[MemoryLayout]:
    """Returns the layout of each of the `tp` ranks of an engine, in the order of ranks.

    Args:
        folder: needs config.json only.
        ep: each rank holds whole experts, instead of a slice of each.
        engine_format: number format of matrices in layers.

    Raises:
        ConfigError: SGLang cannot be imported here, or cannot split the model over `tp` ranks.
        WeightSyncFailed: SGLang's loader does something no copy plan can repeat, which the message names.
    """
    prepare()
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    if found := faults(architecture, tp=tp, ep=ep):
        raise ConfigError(found)
    arguments = _arguments(folder, dtype=dtype, tp=tp, ep=ep, engine_format=engine_format)
    tensors = shapes(family.tensors(architecture), engine_format)
    dtypes = None if engine_format is EngineFormat.NONE else formats(tensors, dtype)
    return record_ranks(tensors, tp=tp, play=lambda rank: _play(rank, arguments), dtypes=dtypes)


def tie(model: Any, config: Any) -> None:
    """Ties the output layer to the embedding if the Hugging Face `config` asks for it.

    Workaround for SGLang 0.5.23, which ignores tie_word_embeddings for Qwen3-MoE
    (https://github.com/sgl-project/sglang/pull/20127). Its output layer, which no tensor of the checkpoint fills, then
    stays uninitialised. Not needed any more once a tied Qwen3-MoE shares the parameter by itself.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return
    output, embedding = getattr(model, "lm_head", None), model.get_submodule("model.embed_tokens")
    if output is not None and output is not embedding:
        output.weight = embedding.weight


def _arguments(
    folder: Path, *, dtype: torch.dtype, tp: int, ep: bool, engine_format: EngineFormat = EngineFormat.NONE
) -> Any:
    """Returns SGLang's resolved ServerArgs of an engine with these settings."""
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    arguments = server_args.ServerArgs(
        model_path=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        tp_size=tp,
        ep_size=tp if ep else 1,
        device="cpu",
        # Not the CPU's backend, which supports only some models; none of its kernels runs here.
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        json_model_override_args=json.dumps(overrides_of(folder) | stated_format(folder, engine_format)),
    )
    # SGLang 0.5.17 does it when the object is created.
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
    return arguments


@contextmanager
def _play(rank: int, arguments: Any) -> Iterator[Any]:
    """See `record_ranks`."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import loader

    with _stand_in_groups(rank, arguments):
        runtime_context.get_context().set_server_args(arguments)
        try:
            config = ModelConfig.from_server_args(arguments)
            quantization = loader._get_quantization_config(config, LoadConfig())
            with without_memory(config.dtype):
                model = loader._initialize_model(config, LoadConfig(), quantization)
            tie(model, config.hf_config)
            yield model
        finally:
            runtime_context.reset_context()


@contextmanager
def _stand_in_groups(rank: int, arguments: Any) -> Iterator[None]:
    """Makes this process rank `rank` of an engine inside the `with`, as far as SGLang's layers can see.

    Raises:
        ConfigError: the process is a rank of a real engine already.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_parallel

    mine, alone = SimulatedGroup(rank, arguments.tp_size), SimulatedGroup(0, 1)
    groups: dict[str, SimulatedGroup] = {
        **dict.fromkeys(("tp", "attn_tp", "moe_tp", "moe_ep"), mine),
        **dict.fromkeys(("pp", "moe_dp", "attn_cp"), alone),
    }
    groups["moe_tp" if arguments.ep_size > 1 else "moe_ep"] = alone
    values: dict[str, Any] = {"attn_dp_size": 1, "attn_dp_rank": 0}
    for name, group in groups.items():
        values |= {f"{name}_size": group.world_size, f"{name}_rank": group.rank, f"{name}_group": group}
    names = {name: f"_{name.upper()}" for name in groups}
    if any(getattr(parallel_state, each) is not None for each in names.values()):
        raise ConfigError(
            [
                Fault(
                    "rollout.name",
                    got="sglang",
                    stated=True,
                    said="an engine runs in this process, so no other rank can be simulated in it; "
                    "record layouts in another process",
                )
            ]
        )
    try:
        # Layers of SGLang 0.5.23 use the first, those of 0.5.17 either.
        with get_parallel().override(**values):
            for name, each in names.items():
                setattr(parallel_state, each, groups[name])
            yield
    finally:
        for each in names.values():
            setattr(parallel_state, each, None)
