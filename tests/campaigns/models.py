"""Model folders with damaged files and wrong numbers. `python -m tests.campaigns.models`."""

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlframe.models.hub import EMBEDDED
from tests.campaigns.attempts import attempt, command_line, composed, with_values
from tests.campaigns.trials import Outcome, Trial, write
from tests.tiny_models import make

FAMILIES = ("qwen3_tied", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HARMLESS = {"generation_config.json"}
"""Files that nothing is taken from before a run."""
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "gone": lambda content: b"",
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "noise": lambda content: b"\xff\xfe\x80" * 40,
    "a list": lambda content: b"[]",
    "null": lambda content: b"null",
    "deep": lambda content: b"[" * 150_000 + b"]" * 150_000,
}
"""What becomes of the bytes of any file."""
NUMBERS = (None, "x", -1, 0, 1.5, True, math.nan, math.inf, 10**12, [], {})
KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "num_experts_per_tok", "moe_intermediate_size",
    "tie_word_embeddings", "rope_parameters", "model_type",
)  # fmt: skip
TEMPLATES = {
    "raises": "{{ raise_exception('no') }}",
    "divides by zero": "{{ 1 // 0 }}",
    "wrong type": "{{ messages + 1 }}",
    "no syntax": "{% for %}",
    "nothing": "",
    "spaces": "{% if false %}x{% endif %}",
    "drops the user": "{% for m in messages %}{{ m.role }}{% endfor %}",
    "does not end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "reaches into Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}",
}


class Campaign:
    """Tries model folders in a folder of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        data = folder / "x.jsonl"
        rows = [{"prompt": f"{index}+1=", "answer": str(index + 1)} for index in range(4)]
        data.write_text("\n".join(map(json.dumps, rows)))
        small = ["data.max_prompt_tokens=32", "rollout.max_tokens=16", f"data.path={data}", "data.template_limit_s=2"]
        small += ["train.parallel=d1"]
        self.values = composed("grpo_qwen3_moe", *small)
        self.count = 0

    def sound(self, family: str) -> Path:
        """A whole folder of the family."""
        kept = self.folder / family
        if not kept.exists():
            make(family, kept, vocab_size=261, pad_token_id=None, bos_token_id=None, eos_token_id=None)
            for name in TOKENIZER:
                shutil.copy(EMBEDDED / "qwen3_moe_tiny" / name, kept / name)
        return kept

    def copy(self, family: str) -> Path:
        """Another copy of it, to be damaged."""
        self.count += 1
        return Path(shutil.copytree(self.sound(family), self.folder / f"{family} {self.count}"))

    def tried(self, name: str, model: Path, *names: str) -> Trial:
        """The attempt to train it."""
        trial = attempt(name, with_values(self.values, model__path=str(model)), names=names)
        if model.parent == self.folder and " " in model.name:
            shutil.rmtree(model)
        return trial

    def refused(self, trial: Trial) -> Trial:
        """The trial; to have been accepted is wrong."""
        if trial.outcome is Outcome.USED:
            return Trial(name=trial.name, outcome=Outcome.WRONG, said="accepted", seconds=trial.seconds)
        return trial

    def of_files(self, family: str) -> Iterator[Trial]:
        """Each file with each damage."""
        for file in sorted(path.name for path in self.sound(family).iterdir()):
            for damage, change in BYTES.items():
                folder = self.copy(family)
                path = folder / file
                if damage == "gone":
                    path.unlink()
                else:
                    path.write_bytes(change(path.read_bytes()))
                trial = self.tried(f"{family}: {file} {damage}", folder, str(folder))
                optional = file in HARMLESS or (file == "tokenizer_config.json" and damage == "gone")
                # A template of other text is a template, if it writes what the user says.
                yield trial if optional else self.refused(trial)

    def of_numbers(self, family: str) -> Iterator[Trial]:
        """Each key of config.json with each value."""
        config = json.loads((self.sound(family) / "config.json").read_text())
        for key in KEYS:
            for value in NUMBERS if key in config else ():
                folder = self.copy(family)
                (folder / "config.json").write_text(json.dumps(config | {key: value}))
                trial = self.tried(f"{family}: {key} {value!r:.20}", folder, "config.json")
                allowed = value is None or (key == "tie_word_embeddings") or value == {}
                yield trial if allowed else self.refused(trial)

    def of_counts(self, family: str) -> Iterator[Trial]:
        """Counts that the weights are not of."""
        config = json.loads((self.sound(family) / "config.json").read_text())
        for key in ("num_hidden_layers", "num_experts", "num_local_experts", "n_routed_experts", "num_key_value_heads",
                    "num_attention_heads", "vocab_size", "intermediate_size", "moe_intermediate_size", "hidden_size",
                    "head_dim", "kv_lora_rank", "v_head_dim", "n_shared_experts"):  # fmt: skip
            if isinstance(config.get(key), int):
                for value in (config[key] * 2, config[key] // 2):
                    folder = self.copy(family)
                    (folder / "config.json").write_text(json.dumps(config | {key: value}))
                    trial = self.tried(f"{family}: {key} {value} for {config[key]}", folder, "config.json")
                    # Where a key counts for nothing in the family, nothing is wrong: DeepSeek's heads have own keys.
                    unread = family == "deepseek_v3" and key in ("num_key_value_heads", "head_dim")
                    unread |= family in ("mixtral", "gpt_oss", "qwen3_moe") and key == "num_experts"
                    unread |= family == "qwen3_moe" and key == "intermediate_size"
                    yield trial if unread else self.refused(trial)

    def of_tensors(self, family: str) -> Iterator[Trial]:
        """Tensors of another kind, shape or content, missing or too many."""
        tensors = load_file(self.sound(family) / "model.safetensors")
        names = list(tensors)
        for name in (names[0], names[len(names) // 2], names[-1]):
            own = tensors[name]
            spoiled = own.clone()
            spoiled.view(-1)[own.numel() // 2] = math.nan
            endless = own.clone()
            endless.view(-1)[-1] = -math.inf
            changes: dict[str, torch.Tensor | None] = {
                "missing": None,
                "NaN": spoiled,
                "infinity": endless,
                "int8": own.to(torch.int8),
                "bool": own > 0,
                "float64": own.double(),
                "a row more": torch.cat([own, own[:1]]),
                "flat": own.reshape(1, -1),
            }
            for what, value in changes.items():
                folder = self.copy(family)
                left = {key: one for key, one in tensors.items() if key != name}
                save_file(
                    left | ({name: value.contiguous()} if value is not None else {}), folder / "model.safetensors"
                )
                yield self.refused(self.tried(f"{family}: {name} {what}", folder, str(folder), name))
        folder = self.copy(family)
        save_file(tensors | {"model.layers.7.more": torch.ones(2)}, folder / "model.safetensors")
        yield self.refused(self.tried(f"{family}: one more", folder, "model.layers.7.more"))

    def of_templates(self) -> Iterator[Trial]:
        """Chat templates that cannot be used."""
        for name, template in TEMPLATES.items():
            folder = self.copy("qwen3_moe")
            (folder / "chat_template.jinja").write_text(template)
            yield self.refused(self.tried(f"template {name}", folder, "chat template", str(folder)))

    def of_paths(self) -> Iterator[Trial]:
        """Paths that name no model."""
        for path in ("nowhere", "/dev/null", "/proc/self", "~nobody-at-all", "x" * 5000, "a/" * 3000, "\x00", "/", ""):
            trial = attempt(f"path {path!r:.30}", with_values(self.values, model__path=path), names=("model.path",))
            yield self.refused(trial)

    def of_command_lines(self) -> Iterator[Trial]:
        """A few through the real door."""
        damages = {
            "NaN": ("model.safetensors", lambda content: content[:-8] + b"\xff" * 8),
            "weights cut": ("model.safetensors", BYTES["cut"]),
            "config noise": ("config.json", BYTES["noise"]),
            "tokenizer noise": ("tokenizer.json", BYTES["noise"]),
            "template without end": ("chat_template.jinja", lambda content: TEMPLATES["does not end"].encode()),
        }
        for name, (file, change) in damages.items():
            folder = self.copy("qwen3_moe")
            (folder / file).write_bytes(change((folder / file).read_bytes()))
            small = ["data.max_prompt_tokens=32", "rollout.max_tokens=16", f"model.path='{folder}'", "output=run"]
            yield command_line(f"model {name}", folder, *small, names=(str(folder),))

    def every(self, stride: int = 1) -> Iterator[Trial]:
        """All of them, of every n-th family."""
        for family in FAMILIES[::stride]:
            yield self.tried(f"{family}: sound", self.copy(family))
            yield from self.of_tensors(family)
            yield from self.of_counts(family)
        yield from self.of_files("qwen3_moe")
        yield from self.of_numbers("qwen3_moe")
        yield from self.of_templates()
        yield from self.of_paths()
        yield from self.of_command_lines()


def main() -> None:
    """Tries all, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stride", type=int, default=1, help="try every n-th family only")
    stride = parser.parse_args().stride
    folder = Path(tempfile.mkdtemp(prefix="models-"))
    trials = Campaign(folder).every(stride)
    print(write("models", trials, command=f"python -m tests.campaigns.models --stride {stride}").row())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
