"""vLLM's attention layers that norm and rotate in one operation, beside their own `forward`.

The operation's kernel runs on GPUs only: here its formula stands in for it, and interpreted/rotary.py compares the two.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.rollout.vllm import layout as vllm_layout
from tests.tiny_models import make
from tests.unit.rollout.vllm.interpreted.formulas import normed_and_rotated

pytest.importorskip("vllm")
pytest.importorskip("triton")
pytestmark = pytest.mark.engine


class Attended(torch.nn.Module):
    """In the place of attention to a cache: every argument counts in what it returns."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query * key.sum(-1, keepdim=True) + value.sum(-1, keepdim=True)


@pytest.fixture
def operation() -> Iterator[None]:
    import rlframe.rollout.vllm.decode.rotary  # noqa: F401 - has the operation

    library = torch.library.Library("rlframe", "IMPL")
    library.impl("rotate", normed_and_rotated, "CPU")
    yield
    library._destroy()


def models(folder: Path) -> tuple[Any, Any]:
    """The same model twice."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.deepcopy(vllm_layout._config(folder, dtype=torch.float32, tp=1, ep=False))
    with vllm_layout._stand_in_groups(0, 1), set_current_vllm_config(config), torch.no_grad():
        model: Any = initialize_model(config)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter.data, -0.5, 1.0)
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedLinearMethod":
            weight = module.weight
            method.process_weights_after_loading(module)
            # vLLM packs weights on a CPU, and leaves none.
            module.weight = weight
    return model, config


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_scaled", "qwen3_moe"])
def test_a_layer_computes_what_it_did(
    name: str, tmp_path: Path, operation: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config

    from rlframe.rollout.vllm.decode import rotary

    make(name, tmp_path)
    model, config = models(tmp_path)
    layers = [module for module in model.modules() if type(module).__name__ in rotary.ATTENTIONS]
    monkeypatch.setattr(type(layers[0]), "forward", type(layers[0]).forward)
    positions = torch.tensor([3, 0, 17])
    x = torch.randn(3, layers[0].qkv_proj.input_size, generator=torch.Generator().manual_seed(0))
    for layer in layers:
        layer.attn = Attended()
    with set_current_vllm_config(config), torch.no_grad():
        before = [layer(positions, x) for layer in layers]
        rotary.install(model)
        rotary.install(model)
        calls = []
        monkeypatch.setattr(rotary, "has_norms", lambda layer, own=rotary.has_norms: calls.append(layer) or own(layer))
        after = [layer(positions, x) for layer in layers]
    assert {id(layer) for layer in layers} <= {id(layer) for layer in calls}, "the operation was not taken"
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["glm4_moe", "olmo3", "exaone4"])
def test_other_layers_are_left_as_they_are(name: str, tmp_path: Path) -> None:
    from rlframe.rollout.vllm.decode import rotary

    make(name, tmp_path)
    model, _ = models(tmp_path)
    before = {type(module).__name__: type(module).forward for module in model.modules()}
    rotary.install(model)
    assert {type(module).__name__: type(module).forward for module in model.modules()} == before
    assert not any(hasattr(module, rotary.ROTATES) for module in model.modules())
