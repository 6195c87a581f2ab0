"""Converts weights between Hugging Face and Megatron checkpoints, from GGUF files and from quantised checkpoints:
`python -m rlframe.tools.convert --help`.

It runs in one process on the CPU. A GGUF file becomes a model folder in Hugging Face format, and so does a quantised
checkpoint, which runs also read as it is. For Megatron it writes a
distributed checkpoint that every parallel layout can load (`checkpoint.start_from`). It reads such a checkpoint, or the
`training` folder of a run's checkpoint. Tensors are streamed, so the whole model is never in memory, except from GGUF
and for `--verify`, which computes with both models, one after the other, in float32.
"""

import argparse
import math
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlframe.data.config import DataConfig
from rlframe.data.text.chat import exported
from rlframe.loops.report.files import read_yaml
from rlframe.megatron.checkpoint.checksums import CHECKSUMS, verify_share
from rlframe.megatron.checkpoint.metadata import read_metadata
from rlframe.megatron.config.mtp import in_head
from rlframe.megatron.config.train import Dtype
from rlframe.megatron.cpu import platform
from rlframe.models import gguf, inspection, transformers_config
from rlframe.models.chat_template import Exported
from rlframe.models.checkpoint import CheckpointReader, copy_sidecars, write_checkpoint
from rlframe.models.config import HEAD, ModelConfig
from rlframe.models.families.base import Architecture
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.models.quantized import stated
from rlframe.models.tokenizer import load as load_tokenizer
from rlframe.rollout.served.plain import dequantized_model, is_quantized
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.errors import CheckpointError, ConfigError, RlframeError
from rlframe.utils.files.whole import whole_folder, writing
from rlframe.utils.nested import flat

TO_MEGATRON, TO_HUGGING_FACE, FROM_GGUF, DEQUANTIZE = "to-megatron", "to-huggingface", "from-gguf", "dequantize"
GIGABYTE = 1e9
LORA = "lora."
"""Beginning of the names of adapters in a distributed checkpoint; see `rlframe.megatron.lora.state`."""
EMBEDDING = "embedding"
"""Name of the algorithm whose models have no head."""
VERIFIED_TOKENS = 64
LIMIT_NATS = 1e-3
"""Greatest difference in nats for `--verify`. Two float32 implementations of one model differ by 1e-5 to 1e-4; a wrong
tensor causes tenths and more."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Converts as the command line requests."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        convert(options)
    except ConfigError as error:
        parser.error("; ".join(map(str, error.faults)))
    except (RlframeError, ValueError) as error:
        parser.error(str(error))


def convert(options: argparse.Namespace) -> None:
    """Writes `options.out`, which exists only after it is complete.

    Raises:
        CheckpointError: a source is missing, damaged or of another model; `out` exists; or, with `verify`, the two
            models differ.
        OutputError: `out` cannot be written.
        ConfigError: no family has the model's model_type.
    """
    out = Path(options.out)
    if out.exists():
        raise CheckpointError(f"--out must not exist yet, got {out}")
    if options.direction == FROM_GGUF:
        file = gguf.find(options.gguf)
        with whole_folder(out) as partial, writing(partial):
            gguf.to_hugging_face(file, partial, dtype=getattr(torch, options.dtype))
    elif options.direction == DEQUANTIZE:
        _dequantize(options, out)
    else:
        _to_or_from_megatron(options, out)
    print(f"written to {out}", file=sys.stderr)


def _dequantize(options: argparse.Namespace, out: Path) -> None:
    """Writes what the weights of a quantised checkpoint stand for, all of them, also those of layers that runs do not
    load. The model may be of any family."""
    folder = resolve(ModelConfig(path=options.model))
    hf = read_config(folder)
    if stated.section(hf) is None:
        raise CheckpointError(f"{folder} is not quantised: its config.json has no {stated.KEY}; use it as it is")
    if faults := stated.faults(hf):
        raise CheckpointError(f"config.json of {folder}: " + "; ".join(faults))
    reader = CheckpointReader(folder)
    with whole_folder(out) as partial, writing(partial):
        tensors = ((name, reader.tensor(name)) for name in reader.names)
        write_checkpoint(partial, tensors, max_shard_bytes=int(options.shard_gb * GIGABYTE))
        copy_sidecars(folder, partial, dtype=stated.dtype(hf))


def _to_or_from_megatron(options: argparse.Namespace, out: Path) -> None:
    platform.install(torch.device("cpu"))
    from rlframe.megatron.worker import convert as megatron  # noqa: PLC0415 - Megatron must come after the platform

    folder = resolve(ModelConfig(path=options.model, random_init=options.direction == TO_HUGGING_FACE))
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    dtype = getattr(torch, options.dtype)
    template = outputs = None
    if options.direction == TO_MEGATRON:
        if faults := inspection.model_faults(folder, num_outputs=None):
            raise CheckpointError("\n".join(faults))
        keeps_mtp = inspection.has_mtp(folder)
    else:
        _verify_files(Path(options.checkpoint))
        keeps_mtp = _holds_mtp(Path(options.checkpoint))
        outputs = _outputs(Path(options.checkpoint))
        if outputs is not None and options.verify:
            has = f"a head of {outputs} outputs" if outputs else "no head"
            raise CheckpointError(f"--verify compares logprobs, and {options.checkpoint} has {has}")
        template = _chat_template(options, folder)
    with whole_folder(out) as partial, megatron.one_rank():
        bones = megatron.skeleton(family, architecture.keeping_mtp(keeps_mtp).with_outputs(outputs), options.dtype)
        if options.direction == TO_MEGATRON:
            megatron.to_megatron(CheckpointReader(folder), bones, partial)
            hugging_face, distributed = folder, partial
        else:
            distributed = Path(options.checkpoint)
            tensors = megatron.from_megatron(distributed, bones, dtype)
            with writing(partial):
                write_checkpoint(partial, tensors, max_shard_bytes=int(options.shard_gb * GIGABYTE))
                copy_sidecars(folder, partial, dtype=dtype, num_outputs=outputs)
                if template is not None:
                    template.write(partial)
            hugging_face = partial
        if options.verify:
            verify(architecture, hugging_face, distributed, dtype)


def _verify_files(folder: Path) -> None:
    """Refuses a distributed checkpoint that is missing or has changed since it was written; only rlframe's have
    checksums. Reading it later executes no code that it names; see `rlframe.megatron.checkpoint.reading`."""
    if not (folder / ".metadata").is_file():
        found = f"{folder} without .metadata" if folder.is_dir() else f"{folder}, which is no folder"
        inside = sorted(each.parent for each in folder.glob("**/.metadata"))
        advice = f"; write --checkpoint {inside[-1]}" if inside else ""
        raise CheckpointError(f"--checkpoint must be a Megatron distributed checkpoint, got {found}{advice}")
    if (folder / CHECKSUMS).is_file():
        verify_share(folder, rank=0, world=1)


def _holds_mtp(folder: Path) -> bool:
    """Returns whether a distributed checkpoint has a head for multi-token prediction. Refuses one of adapters."""
    names = read_metadata(folder).state_dict_metadata
    if any(name.startswith(LORA) for name in names):
        raise CheckpointError(
            f"{folder} holds adapters (train.lora) without the model that they belong to, which {TO_HUGGING_FACE} does "
            "not merge: their run writes the merged model to its folder model, and the adapter to adapter, when it "
            "ends, and with checkpoint.export_every_steps along the way; resume it for that"
        )
    return any(map(in_head, names))


def _outputs(folder: Path) -> int | None:
    """Returns the number of outputs of the head in a distributed checkpoint of a critic, a reward model or another
    model that gives values. 0 of a model without a head, such as one for embeddings, which only its run tells: the
    checkpoint of a tied language model has the same names. None of a language model."""
    head = read_metadata(folder).state_dict_metadata.get(HEAD)
    if isinstance(head, TensorStorageMetadata):
        return head.size[0]
    return 0 if _settings_of_run(folder).get("algorithm.name") == EMBEDDING else None


def _settings_of_run(checkpoint: Path) -> dict[str, Any]:
    """Returns the settings, by dotted key, of the run whose checkpoint it is. Empty if there is none."""
    return flat(read_yaml(checkpoint.absolute().parent.parent.parent / "config.yaml") or {})


def _chat_template(options: argparse.Namespace, folder: Path) -> Exported | None:
    """Returns the chat template that the exported model gets: that of the options, else that of the run whose
    checkpoint it is. None if the model keeps its own."""
    chosen = options.chat_template or _settings_of_run(Path(options.checkpoint)).get("data.chat_template")
    if chosen is None:
        return None
    return exported(load_tokenizer(folder, chat_template=chosen), DataConfig(chat_template=chosen))


def verify(architecture: Architecture, hugging_face: Path, distributed: Path, dtype: torch.dtype) -> None:
    """Prints how far the two models differ over some tokens, with the weights of both rounded to `dtype`. Needs
    Megatron's process groups of one rank.

    Raises:
        CheckpointError: they differ by more than LIMIT_NATS; the message names the position and both models' values.
    """
    from rlframe.megatron.worker import convert as megatron  # noqa: PLC0415 - see convert

    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, architecture.vocab_size, (VERIFIED_TOKENS,), generator=generator)
    # In a process of its own: with rlframe's CPU platform for Megatron in place, transformers 5 leaves its rotary
    # frequencies uninitialised. It also frees the first model's memory before the second is loaded.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        answer = pool.submit(_transformers_logprobs, hugging_face, token_ids.tolist(), dtype)
        expected = torch.from_numpy(answer.result())
    found = megatron.logprobs(architecture, distributed, token_ids, dtype)
    gaps = (expected - found).abs()
    difference = float(gaps.max())
    if not difference <= LIMIT_NATS:
        position, token = divmod(int(gaps.argmax()), architecture.vocab_size)
        raise CheckpointError(
            f"--verify: the two models differ by up to {difference:.3g} nats over {VERIFIED_TOKENS} tokens, the "
            f"limit is {LIMIT_NATS:g}; at worst, token {token} after position {position}, transformers gives "
            f"{expected[position, token]:.4f} and Megatron {found[position, token]:.4f}"
        )
    print(f"verified: at most {difference:.2g} nats between the models over {VERIFIED_TOKENS} tokens", file=sys.stderr)


@torch.no_grad()
def _transformers_logprobs(folder: Path, token_ids: list[int], dtype: torch.dtype) -> Any:
    """Returns [T, V] nats of the token after each token, in float32, from weights rounded to `dtype`, as a numpy
    array."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds, and only verification needs it

    if is_quantized(folder):
        reference = dequantized_model(folder, dtype=dtype)
    else:
        reference = AutoModelForCausalLM.from_pretrained(folder, config=transformers_config.read(folder), dtype=dtype)
    reference = reference.float().eval()
    return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0], -1).numpy()


def _parser() -> Parser:
    parser = Parser(
        prog="python -m rlframe.tools.convert",
        description="Weights between Hugging Face and Megatron distributed checkpoints, from GGUF files and from "
        "quantised checkpoints.",
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    forth = directions.add_parser(TO_MEGATRON, help="a Hugging Face model into a distributed checkpoint")
    back = directions.add_parser(TO_HUGGING_FACE, help="a distributed checkpoint into a Hugging Face model")
    gguf_file = directions.add_parser(FROM_GGUF, help="a GGUF file into a Hugging Face model")
    plain = directions.add_parser(DEQUANTIZE, help="a quantised Hugging Face model into one in the dtype of its config")
    gguf_file.add_argument("--gguf", required=True, help="a .gguf file, or an installed package that ships one")
    forth.add_argument("--model", required=True, help="a folder in Hugging Face format, or a hub id")
    back.add_argument("--checkpoint", required=True, help="the folder with .metadata, such as step-00000050/training")
    back.add_argument(
        "--chat-template",
        help="a Jinja file or chatml or plain, in the place of the model's own; default: data.chat_template of the run",
    )
    back.add_argument("--model", required=True, help="a model whose config and tokenizer to take: folder or hub id")
    plain.add_argument("--model", required=True, help="a folder in Hugging Face format, or a hub id")
    for each in (back, plain):
        each.add_argument("--shard-gb", type=_positive, default=5.0, help="GB of a file at most (default %(default)s)")
    for each in (forth, back, gguf_file, plain):
        each.add_argument("--out", required=True, help="a folder that does not exist yet")
    for each in (forth, back, gguf_file):
        each.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.BFLOAT16, help="of what is written")
    for each in (forth, back):
        each.add_argument("--verify", action="store_true", help="compare the two models' logprobs on some tokens")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


if __name__ == "__main__":
    run_tool(main)
