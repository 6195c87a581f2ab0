"""vLLM's dense layers that leave what lies between two attentions to one operation, beside their own `forward`.

The operation's kernel runs on GPUs only: here its formula stands in for it, and test_between_cuda.py compares the two.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny_models import make
from tests.unit.rollout.vllm.interpreted.formulas import between_attentions, normed_and_rotated
from tests.unit.rollout.vllm.test_rotary import Attended, models

pytest.importorskip("vllm")
pytest.importorskip("triton")
pytestmark = pytest.mark.engine


def settings(**other: Any) -> Any:
    """As much of a VllmConfig as is read."""
    return SimpleNamespace(**({"lora_config": None, "speculative_config": None, "additional_config": {}} | other))


@pytest.fixture
def operations() -> Iterator[None]:
    import rlframe.rollout.vllm.decode.between.operation
    import rlframe.rollout.vllm.decode.rotary  # noqa: F401 - has the operation

    library = torch.library.Library("rlframe", "IMPL")
    library.impl("rotate", normed_and_rotated, "CPU")
    library.impl("between", between_attentions, "CPU")
    yield
    library._destroy()


def installed(model: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers of a model after both installations, which the test takes back."""
    from rlframe.rollout.vllm.decode import joined, rotary

    layers = list(model.model.layers)
    for kind in {type(layers[0]), type(layers[0].self_attn)}:
        monkeypatch.setattr(kind, "forward", kind.forward)
    rotary.install(model)
    joined.install(model, config)
    return layers


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_scaled"])
def test_a_chain_of_layers_computes_what_it_did(
    name: str, tmp_path: Path, operations: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import set_current_vllm_config

    from rlframe.rollout.vllm.decode import joined

    make(name, tmp_path)
    model, config = models(tmp_path)
    for layer in model.model.layers:
        layer.self_attn.attn = Attended()
    positions = torch.tensor([3, 0, 17])
    x = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def chain() -> Tensor:
        hidden, residual = x, None
        for layer in model.model.layers:
            hidden, residual = layer(positions, hidden, residual)
        return model.model.norm(hidden, residual)[0]

    calls = []
    monkeypatch.setattr(joined, "takes", lambda weights: True)
    monkeypatch.setattr(joined, "weights", lambda *given, own=joined.weights: calls.append(given) or own(*given))
    with set_current_vllm_config(config), torch.no_grad():
        before = chain()
        layers = installed(model, plain := settings(additional_config={"one": 1}), monkeypatch)
        calls.clear()
        after = chain()
    assert len(calls) == len(layers) > 1, "the operation was not taken by every layer"
    assert plain.additional_config == {"one": 1, joined.JOINED: True}
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("other", [{"lora_config": 1}, {"speculative_config": 1}])
def test_layers_with_adapters_or_drafts_are_left_as_they_are(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlframe.rollout.vllm.decode import joined

    make("qwen3", tmp_path)
    monkeypatch.setattr(joined, "takes", lambda weights: True)
    config = settings(**other)
    assert not any(hasattr(layer, joined.JOINED) for layer in installed(models(tmp_path)[0], config, monkeypatch))
    assert config.additional_config == {joined.JOINED: False}


def test_layers_are_joined_only_where_all_of_them_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlframe.rollout.vllm.decode import joined

    make("qwen3", tmp_path)
    monkeypatch.setattr(joined, "takes", lambda weights: True)
    for change in (
        lambda layer: setattr(layer.mlp.down_proj, "quant_method", object()),
        lambda layer: setattr(layer.mlp.down_proj, "bias", torch.nn.Parameter(torch.zeros(1))),
        lambda layer: setattr(layer.mlp.gate_up_proj, "tp_size", 2),
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.1),
        lambda layer: setattr(layer.mlp, "act_fn", torch.nn.GELU()),
        # As where vLLM brings weights from the host's memory.
        lambda layer: setattr(layer, "forward", layer.forward),
        lambda layer: setattr(layer.mlp.down_proj.weight, joined.ELSEWHERE, True),
    ):
        model, _ = models(tmp_path)
        change(model.model.layers[1])
        assert not any(hasattr(layer, joined.JOINED) for layer in installed(model, settings(), monkeypatch))
    assert all(hasattr(layer, joined.JOINED) for layer in installed(models(tmp_path)[0], settings(), monkeypatch))


def test_the_kernel_takes_multiples_of_what_a_slot_holds() -> None:
    from rlframe.rollout.vllm.decode.between.launch import DEPTH, TILE, Layer, takes

    def layer(hidden: int = 512, heads: int = 512, inner: int = 1024, columns: int = 48, **other: Any) -> Layer:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.bfloat16)

        found = Layer(
            zeros(hidden, heads), zeros(hidden), zeros(2 * inner, hidden), zeros(hidden, inner),
            zeros(hidden), zeros(columns, hidden), None,
        )  # fmt: skip
        return found._replace(**other)

    assert (DEPTH, TILE) == (512, 16)
    assert takes(layer()) and takes(layer(next=None, next_norm=None))
    for wrong in ({"hidden": 768}, {"heads": 768}, {"inner": 768}, {"columns": 40}, {"hidden": 4608}):
        assert not takes(layer(**wrong)), wrong
    assert not takes(layer(norm=torch.zeros(512)))
    assert not takes(layer(down=torch.zeros(1024, 512, dtype=torch.bfloat16).T))


def test_python_and_the_kernel_know_the_same_numbers() -> None:
    from rlframe.rollout.vllm.decode.between import launch

    source = launch.SOURCE.read_text()
    for name in ("ROWS", "TILE", "DEPTH", "WARPS", "LOADERS"):
        found = re.search(rf"constexpr int {name} = (\d+);", source)
        assert found and int(found[1]) == getattr(launch, name)
    # The fields of both structures, in order.
    structure = source[source.index("struct Step {") : source.index("// -- numbers and memory")]
    fields = re.sub(r"//.*", "", structure).replace("struct Step {", "")
    named = re.findall(r"\*?(\w+)[,;]", fields)
    assert named == [field[0] for field in launch._Step._fields_]


def test_models_that_add_something_between_layers_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlframe.rollout.vllm.decode import joined

    make("qwen3", tmp_path)
    monkeypatch.setattr(joined, "takes", lambda weights: True)
    model, _ = models(tmp_path)
    own = type(model.model)
    model.model.__class__ = type("MossQwen3Model", (own,), {"__module__": own.__module__})
    assert not any(hasattr(layer, joined.JOINED) for layer in installed(model, settings(), monkeypatch))


@pytest.mark.parametrize("hidden", [512, 1024, 2048, 2560, 4096])
def test_the_ring_has_as_many_slots_as_fit(hidden: int) -> None:
    from rlframe.rollout.vllm.decode.between.launch import LEAST_STAGES, shared_bytes, stages_for

    limit = 227 << 10
    stages = stages_for(hidden, limit)
    assert stages >= LEAST_STAGES and shared_bytes(hidden, stages) <= limit < shared_bytes(hidden, stages + 1)
    # A program of a GPU of compute capability 12 has less. It is told of, and the layers are left as they are.
    assert stages_for(hidden, 99 << 10) < LEAST_STAGES
