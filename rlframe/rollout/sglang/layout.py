"""The layouts of SGLang's ranks, recorded from SGLang's own loader in one process; see `played_ranks`.

SGLang decides some of it by the device it finds, which here is none. What its CPU path alone does is left out (it pads
the width of experts to 32 times tp), for the answer is to hold on GPUs. What only CUDA does cannot be seen: GLM-4.5's
shared experts become further experts of the routed ones there, of the same bytes.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config
from rlframe.rollout.served.played_ranks import PlayedGroup, record_ranks, split_faults, without_memory
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.layout.memory import MemoryLayout


def prepare() -> None:
    """Import what recording needs.

    Raises:
        ConfigError: SGLang is not installed, or cannot be imported on this machine.
    """
    # A recording's messages are its errors; SGLang would tell of each model that it cannot import here.
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
            f"rollout.name=sglang: SGLang is installed, but cannot be imported here ({error}); record its layouts "
            "where it can, such as on a machine with a GPU, which is not used"
        ]
    )


def faults(architecture: Architecture, *, tp: int, ep: bool) -> list[Fault]:
    """Why SGLang cannot split this model so; empty when it can."""
    found = split_faults("sglang", architecture, tp=tp, ep=ep)
    name, num_experts = architecture.model_type, architecture.num_experts
    # vLLM gives the first ranks one expert more; SGLang asserts that none is left over.
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


def engine_layouts(folder: Path, *, dtype: torch.dtype, tp: int = 1, ep: bool = False) -> list[MemoryLayout]:
    """The layout of each of the `tp` ranks of an engine, in the order of ranks.

    Args:
        folder: needs config.json only.
        ep: whole experts are shared out over the ranks, instead of a slice of each.

    Raises:
        ConfigError: SGLang cannot be imported here, or cannot split the model so.
        WeightSyncFailed: SGLang's loader does what no copy plan can repeat; says what.
    """
    prepare()
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    if found := faults(architecture, tp=tp, ep=ep):
        raise ConfigError(found)
    arguments = _arguments(folder, dtype=dtype, tp=tp, ep=ep)
    return record_ranks(family.tensors(architecture), tp=tp, play=lambda rank: _play(rank, arguments))


def tie(model: Any, config: Any) -> None:
    """Let the output layer be the embedding where the Hugging Face `config` says so. SGLang 0.5.23 does not look at
    tie_word_embeddings for Qwen3-MoE, and leaves an output layer that no tensor of the checkpoint fills as it was
    allocated."""
    if not getattr(config, "tie_word_embeddings", False):
        return
    output, embedding = getattr(model, "lm_head", None), model.get_submodule("model.embed_tokens")
    if output is not None and output is not embedding:
        output.weight = embedding.weight


def _arguments(folder: Path, *, dtype: torch.dtype, tp: int, ep: bool) -> Any:
    """SGLang's ServerArgs of such an engine, resolved."""
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    arguments = server_args.ServerArgs(
        model_path=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        tp_size=tp,
        ep_size=tp if ep else 1,
        device="cpu",
        # Not of the CPU's, which take only some models; none of its kernels is touched.
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
    )
    # 0.5.17 does it when the object is made.
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
            with without_memory(config.dtype):
                model = loader._initialize_model(config, LoadConfig())
            tie(model, config.hf_config)
            yield model
        finally:
            runtime_context.reset_context()


@contextmanager
def _stand_in_groups(rank: int, arguments: Any) -> Iterator[None]:
    """For a while this process is rank `rank` of one engine, as far as SGLang's layers can tell.

    Raises:
        ConfigError: the process is a rank of a real engine already.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_parallel

    mine, alone = PlayedGroup(rank, arguments.tp_size), PlayedGroup(0, 1)
    groups: dict[str, PlayedGroup] = {
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
                    said="an engine runs in this process, so no other rank can be played in it",
                )
            ]
        )
    try:
        # Layers of 0.5.23 ask the first, those of 0.5.17 either.
        with get_parallel().override(**values):
            for name, each in names.items():
                setattr(parallel_state, each, groups[name])
            yield
    finally:
        for each in names.values():
            setattr(parallel_state, each, None)
