"""Exports of models in Hugging Face format to a run's folder, during the run and at its end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlframe.loops.config import CheckpointConfig
from rlframe.megatron.driver.policy import ModelGroup, PolicyGroup
from rlframe.models import adapters
from rlframe.models.chat_template import Exported
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.utils.errors import OutputError
from rlframe.utils.files import whole

GIGABYTE = 1e9
NO_MODELS: Mapping[str, ModelGroup] = {}


class Exporter:
    """Writes a run's models."""

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        policy: PolicyGroup,
        auxiliary: Mapping[str, ModelGroup] = NO_MODELS,
        chat_template: Exported | None = None,
    ):
        """
        Args:
            folder: of the run.
            auxiliary: further models in training, by role.
            chat_template: the one that the models get in the place of their own.
        """
        self.config, self.folder, self.policy, self.auxiliary = config, folder, policy, auxiliary
        self.chat_template = chat_template
        self.dtype = getattr(torch, config.export_dtype)

    def __call__(self, name: str) -> None:
        """Writes the model in Hugging Face format to the run's folder `name`. Every further trained model, such as a
        critic, goes to `critic` next to `model`, and otherwise to `<name>-critic`. Adapters are also written in PEFT's
        format, to `adapter` or `<name>-adapter`."""

        def beside(what: str) -> Path:
            return self.folder / (what if name == "model" else f"{name}-{what}")

        self._model(self.policy, self.folder / name)
        for role, model in self.auxiliary.items():
            self._model(model, beside(role))
        if self.policy.setup.train.lora:
            self._adapter(beside("adapter"))

    def _model(self, model: ModelGroup, target: Path) -> None:
        shard_bytes = int(self.config.export_shard_gb * GIGABYTE)
        with whole_folder(target) as folder:
            write_checkpoint(folder, model.export(self.dtype), max_shard_bytes=shard_bytes)
            source, outputs = resolve(model.setup.model), model.algorithm.model_outputs
            copy_sidecars(source, folder, dtype=self.dtype, num_outputs=outputs)
            if self.chat_template is not None:
                self.chat_template.write(folder)

    def _adapter(self, target: Path) -> None:
        lora, source = self.policy.setup.train.lora, resolve(self.policy.setup.model)
        assert lora is not None
        family = load_family(source)
        architecture = family.architecture(read_config(source)).with_outputs(self.policy.algorithm.model_outputs)
        with whole_folder(target) as folder:
            adapters.write(
                folder,
                self.policy.export_adapter(self.dtype),
                base=self.config.start_from or self.policy.setup.model.path,
                model_tensors=family.tensors(architecture),
                rank=lora.rank,
                alpha=lora.alpha,
                rslora=lora.rslora,
                dropout=lora.dropout,
                tied=architecture.tie_embeddings,
                headless=self.policy.algorithm.model_outputs == 0,
            )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write to. After the block it replaces `folder`.

    Raises:
        OutputError: the folder cannot be written.
    """
    with whole.whole_folder(folder) as aside, whole.writing(aside):
        try:
            yield aside
        except SafetensorError as error:
            raise OutputError(f"{aside} cannot be written: {error}; {whole.OTHERWISE}") from error
