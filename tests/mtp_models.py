"""Small random models with a head for multi-token prediction, and the head as transformers' own layers compute it."""

import json
import pathlib
import shutil
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny_models import make, on_disk

BEHIND = "model.layers.2."
NAMES = {
    "deepseek_v3": (BEHIND, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), BEHIND),
    "glm4_moe": (BEHIND, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), BEHIND),
    "glm4_moe_lite": (BEHIND, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), BEHIND),
    "deepseek_v32": (BEHIND, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), BEHIND),
    "qwen3_next": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.layers.0."),
    "qwen3_5": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.layers.0."),
    "qwen3_5_moe": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.layers.0."),
}
"""By model: the beginning of the names of the head's own tensors, those names, the beginning of those of its layer."""
LAYER = "model.layers.1."
"""The layer of a small model that the head's is like."""


@dataclass(kw_only=True)
class Reference:
    """The head, in transformers' modules."""

    trunk: Any
    enorm: nn.Module
    hnorm: nn.Module
    projection: nn.Linear
    layer: nn.Module
    norm: nn.Module
    name: str

    def logits(self, tokens: Tensor, *, as_in_vllm: bool = False) -> Tensor:
        """[n - 1, V] of one sequence: row i is about token i + 2 (arXiv 2412.19437, equations 21 to 23).

        Args:
            as_in_vllm: leave out the embedding beside the first token's state, as vLLM 0.26 to 0.32 do.
        """
        states = self.trunk.model(tokens[None]).last_hidden_state[:, :-1]
        embeddings = self.trunk.model.embed_tokens(tokens[None, 1:])
        if as_in_vllm:
            embeddings = torch.cat([torch.zeros_like(embeddings[:, :1]), embeddings[:, 1:]], dim=1)
        hidden = self.projection(torch.cat([self.enorm(embeddings), self.hnorm(states)], -1))
        positions = torch.arange(hidden.shape[1])[None]
        rope = self.trunk.model.rotary_emb(hidden, positions)
        count = hidden.shape[1]
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        output = self.layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return self.trunk.lm_head(self.norm(output[0] if isinstance(output, tuple) else output))[0]

    def gradients(self) -> dict[str, Tensor]:
        """By the checkpoint's names."""
        prefix, names, layer = NAMES[self.name]
        parts = (self.enorm, self.hnorm, self.projection, self.norm)
        found = {f"{prefix}{name}.weight": part.weight.grad for name, part in zip(names, parts, strict=True)}
        for name, value in self.layer.named_parameters():
            if ".indexer." not in f".{name}":
                written = on_disk(LAYER + name, value.grad, self.trunk.config.model_type)
                found |= {layer + each.removeprefix(LAYER): gradient for each, gradient in written.items()}
        return found


def make_with_mtp(name: str, folder: pathlib.Path, **changes: Any) -> Reference:
    """Writes the model `name`, with `changes`, with a head to `folder` / model, and returns both."""
    trunk = make(name, folder / "model", **changes)
    make(name, folder / "other", **changes)
    generator = torch.Generator().manual_seed(5)
    other = load_file(folder / "other" / "model.safetensors")
    for key, value in other.items():
        other[key] = value + 0.1 * torch.randn(value.shape, generator=generator)
    save_file(other, folder / "other" / "model.safetensors", metadata={"format": "pt"})
    layer = transformers.AutoModelForCausalLM.from_pretrained(folder / "other", dtype=torch.float32).model.layers[1]
    hidden, norm = trunk.config.hidden_size, trunk.model.norm
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    norms = [type(norm)(hidden, eps=eps) for _ in range(3)]
    projection = nn.Linear(2 * hidden, hidden, bias=False)
    with torch.no_grad():
        for part in (*norms, projection):
            part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * 0.2 + (part.weight.dim() == 1))
    found = Reference(
        trunk=trunk, enorm=norms[0], hnorm=norms[1], projection=projection, layer=layer, norm=norms[2], name=name
    )
    prefix, names, inside = NAMES[name]
    tensors = load_file(folder / "model" / "model.safetensors")
    for own, part in zip(names, (norms[0], norms[1], projection, norms[2]), strict=True):
        tensors[f"{prefix}{own}.weight"] = part.weight.detach()
    tensors |= {inside + key.removeprefix(LAYER): value for key, value in other.items() if key.startswith(LAYER)}
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    config = folder / "model" / "config.json"
    key = "num_nextn_predict_layers" if prefix == BEHIND else "mtp_num_hidden_layers"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: 1}))
    return found


def make_served(name: str, folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """A folder in `folder` with the model `name`, a head and a tokenizer, as the contract of engines wants it."""
    from tests.contracts.engines.trainer import make as make_for_engine  # which imports engines

    make_with_mtp(name, folder, **changes)
    made = make_for_engine(name, folder / "with_tokenizer")
    shutil.copy(folder / "model" / "model.safetensors", made)
    own = json.loads((folder / "model" / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(own | {"max_position_embeddings": 1024}))
    return made


def followed_by_the_next(weights: dict[str, Tensor], name: str, *, logit: float) -> dict[str, Tensor]:
    """The weights with which the token after t is t + 1, whatever came before, as the head knows too.

    Layers add nothing to the embeddings, which are unit vectors and so nearly at right angles. The output layer has
    the embedding of t in the row of t + 1, and the head hands on the embedding of the token that it sees.

    Args:
        logit: of t + 1; the others are near 0, a tenth of it at random.
    """
    prefix, own, _ = NAMES[name]
    vocabulary, hidden = weights["model.embed_tokens.weight"].shape
    generator = torch.Generator().manual_seed(7)
    embedding = nn.functional.normalize(torch.randn(vocabulary, hidden, generator=generator), dim=-1)
    silent = (".o_proj.weight", ".down_proj.weight")
    new = {key: torch.zeros_like(value) if key.endswith(silent) else value.clone() for key, value in weights.items()}
    new["model.embed_tokens.weight"] = embedding
    # A norm makes the length of a state the root of its width.
    new["lm_head.weight"] = embedding.roll(1, dims=0) * logit / hidden**0.5
    for norm in ("model.norm.weight", f"{prefix}{own[0]}.weight", f"{prefix}{own[3]}.weight"):
        new[norm] = torch.ones(hidden)
    new[f"{prefix}{own[2]}.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    return new


def reference_of(name: str, weights: dict[str, Tensor], folder: pathlib.Path, scratch: pathlib.Path) -> Reference:
    """The model of `folder` with its head, with these weights."""
    prefix, own, inside = NAMES[name]
    trunk = {key: value for key, value in weights.items() if not key.startswith(prefix)}
    layer = {LAYER + key.removeprefix(inside): value for key, value in weights.items() if key.startswith(inside)}
    loaded = []
    for tensors in (trunk, trunk | {key: value for key, value in layer.items() if key in trunk}):
        shutil.copy(folder / "config.json", scratch)
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        loaded.append(transformers.AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32))
    hidden, norm = loaded[0].config.hidden_size, loaded[0].model.norm
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    parts = [*(type(norm)(hidden, eps=eps) for _ in range(3)), nn.Linear(2 * hidden, hidden, bias=False)]
    embedding, state, final, projection = parts
    with torch.no_grad():
        for key, part in zip(own, (embedding, state, projection, final), strict=True):
            part.weight.copy_(weights[f"{prefix}{key}.weight"])
    return Reference(
        trunk=loaded[0], enorm=embedding, hnorm=state, projection=projection, layer=loaded[1].model.layers[1],
        norm=final, name=name,
    )  # fmt: skip
