"""The plan of a sync from config.json alone: bytes, floors, and every fault as a sentence."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlframe.tools import plan_sync
from rlframe.tools.plan_sync import Case, describe, engine_names, facts, main, solve
from rlframe.weight_sync.layout.memory import MemoryLayout, record_loader
from rlframe.weight_sync.plan.planner import Kind, LinkSpeeds

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
# One layer: 2 heads and 1 KV head of width 4, hidden 8, MLP 6, vocabulary 10.
SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
# embed 10*8 + q 8*8 + k, v 2*4*8 + o 8*8 + q, k norms 2*4 + MLP 3*6*8 + norms 3*8, 2 bytes each.
SMALL_BYTES = 2 * (80 + 64 + 64 + 64 + 8 + 144 + 24)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """Folder of a model with config.json only."""
    return folder_of(tmp_path, SMALL)


def folder_of(path: Path, config: dict[str, Any]) -> str:
    """`path`, with this config.json."""
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_bytes_of_a_colocated_engine_are_read_from_its_own_device(small: str) -> None:
    answer = solve(Case(model=small, train="d2", engine="transformers"))
    assert answer.model_bytes == SMALL_BYTES
    assert answer.plan.link_bytes == {(0, 0): SMALL_BYTES}
    assert answer.plan.kind_bytes == {Kind.DEVICE: SMALL_BYTES}
    assert not answer.fallback
    # bytes / (2117e9 bytes a second), in ms
    assert answer.floor_ms == pytest.approx(SMALL_BYTES / 2117e9 * 1e3)


def test_split_engines_share_out_the_trainers_replicas(small: str) -> None:
    answer = solve(Case(model=small, train="d2", engine="transformers", engines=2, colocate=False))
    assert answer.plan.total_bytes == 2 * SMALL_BYTES
    assert set(answer.plan.kind_bytes) == {Kind.PEER}
    sent = [sum(size for link, size in answer.plan.link_bytes.items() if link[0] == rank) for rank in (0, 1)]
    # Equal but for the largest tensor, the embedding.
    assert abs(sent[0] - sent[1]) <= 2 * 80


def test_engines_on_other_hosts_are_counted_by_the_network(small: str) -> None:
    case = Case(model=small, train="d1", engine="transformers", colocate=False, devices_per_host=1)
    assert solve(case).plan.kind_bytes == {Kind.NETWORK: SMALL_BYTES}


def test_the_command_prints_both_sides_links_floor_and_seconds(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    main(["--model", small, "--train", "d1t1p1", "--engine", "transformers", "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "model", "trainer", "engines", "link", "plan", "floor", "speeds", "seconds", "reload",
    ]  # fmt: skip
    size = f"{SMALL_BYTES / 1e3:.2f} kB"
    assert lines[0] == f"model     {small}: 13 tensors, {size} in bfloat16"
    # Megatron holds q, k and v in one parameter, and gate and up in another; boxes are of Hugging Face tensors.
    assert lines[1] == f"trainer   d1t1p1: 1 rank of {size}, 13 boxes"
    assert lines[2] == f"engines   1 x transformers tp 1 on the trainer's devices: 1 rank of {size}, 13 boxes"
    assert lines[3] == f"link      trainer 0 -> engine 0 rank 0: {size} within the device"
    assert lines[6] == "speeds    within the device 2117 GB/s"
    assert lines[8].startswith("reload    nothing, ")
    written = json.loads(file.read_text())
    assert written["total_bytes"] == SMALL_BYTES
    assert written["links"] == [{"trainer": 0, "engine_rank": 0, "bytes": SMALL_BYTES, "kind": "device"}]
    assert set(written["seconds"]) == {"record_trainer_s", "start_engine_s", "record_engine_s", "plan_s"}
    with pytest.raises(SystemExit):
        main(["--model", small, "--train", "d1", "--engine", "transformers", "--json", str(tmp_path / "no/plan.json")])
    assert "no/plan.json cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["--train", "d2q3"], ["--train: 'd2q3': unknown axis 'q'; known are d, t, p, v, c, e"]),
        (
            ["--train", "d1t2p2", "--tp", "0", "--peer-gb-s", "0"],
            [
                "--tp must be at least 1, got 0",
                "--peer-gb-s must be above 0, got 0.0",
                "train.parallel: tp 2 must divide num_kv_heads 1 of qwen3",
                "train.parallel: pp 2 must divide num_layers 1 of qwen3",
            ],
        ),
        (
            ["--train", "d2", "--tp", "2"],
            [
                "rollout.name=transformers: the transformers engine is one process and does not support tp 2; use vllm "
                "or sglang"
            ],
        ),
        (["--train", "d1", "--engines", "2"], ["2 engines of 1 devices need 2 devices, and the trainer d1 has 1"]),
        (["--train", "d1", "--engine", "magic"], ["--engine must be one of sglang, transformers, vllm, got 'magic'"]),
        (["--train", "d1", "--model", "nowhere"], ["no folder", "no embedded model of that name"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_faults_are_sentences(
    arguments: list[str], sentences: list[str], small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--model", small, "--engine", "transformers", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert all(sentence in error for sentence in sentences), error


def test_every_engine_with_a_layout_is_offered() -> None:
    assert engine_names() == ["sglang", "transformers", "vllm"]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_without_the_engine_its_extra_is_named(engine: str, small: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    with pytest.raises(SystemExit):
        main(["--model", small, "--train", "d1", "--engine", engine])
    message = f"the package {engine} is not installed: pip install 'rlframe[{engine}]'"
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_that_breaks_while_it_is_imported_is_named_with_its_error(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SGLang does on a machine without a GPU, where the torchvision it needs does not load."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit):
        main(["--model", small, "--train", "d1", "--engine", "sglang"])
    message = "SGLang is installed, but its import fails here (operator torchvision::nms does not exist); record"
    assert message in capsys.readouterr().err
    for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def engine_that_computes(monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine whose loader scales what it loads, as one that quantises does."""
    parameter = torch.empty(10, 8)

    def load(pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            parameter.copy_(tensor / 2)

    def engine_layouts(*_: Any, **__: Any) -> list[MemoryLayout]:
        return [record_loader(load, {"embedding": parameter}, {"model.embed_tokens.weight": (10, 8)})]

    module = ModuleType("rlframe.rollout.computing.layout")
    vars(module).update(engine_layouts=engine_layouts, prepare=lambda: None, faults=lambda *_, **__: [])
    monkeypatch.setitem(sys.modules, "rlframe.rollout.computing", ModuleType("rlframe.rollout.computing"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plan_sync, "engine_names", lambda: ["computing"])
    return "computing"


def test_an_engine_that_cannot_be_recorded_is_streamed_whole_tensors_and_the_reason_given(
    small: str, engine_that_computes: str
) -> None:
    answer = solve(Case(model=small, train="d2", engine=engine_that_computes, tp=2))
    # Each of the two ranks takes everything.
    assert answer.plan.total_bytes == 2 * SMALL_BYTES
    lines = list(describe(answer))
    assert lines[-1].startswith(
        "reload    everything, as whole tensors through the engine's reload: the loader of model."
    )
    assert "aten.div" in facts(answer)["fallback"]


@pytest.mark.engine
@pytest.mark.thorough
def test_floors_of_qwen3_30b_into_vllm_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    folder = folder_of(tmp_path, QWEN3_30B)
    aligned = solve(Case(model=folder, train="d4e4", engine="vllm", tp=4, ep=True))
    # 61.06 GB in all; a rank holds its experts and its part of the rest, 15.3 GB, at 2117 GB/s.
    assert aligned.model_bytes == pytest.approx(61.06e9, rel=1e-3)
    assert set(aligned.plan.kind_bytes) == {Kind.DEVICE}
    assert aligned.floor_ms == pytest.approx(7.2, rel=0.1)
    crossed = solve(Case(model=folder, train="d4e4", engine="vllm", tp=4, speeds=LinkSpeeds(peer=370.0)))
    # Each rank needs a quarter of every expert, 14.5 GB, three quarters of it from other devices: 10.87 GB.
    assert crossed.plan.kind_bytes[Kind.PEER] == pytest.approx(4 * 10.87e9, rel=1e-2)
    assert crossed.floor_ms == pytest.approx(29.4, rel=0.1)
    split = solve(Case(model=folder, train="d2e2", engine="vllm", tp=2, colocate=False, speeds=LinkSpeeds(peer=370.0)))
    # 2 + 2 devices: each engine rank takes half of all, 30.5 GB.
    assert split.floor_ms == pytest.approx(82.5, rel=0.1)


def test_many_links_are_summed_by_medium(small: str) -> None:
    answer = solve(Case(model=small, train="d66", engine="transformers", engines=66))
    lines = [line for line in describe(answer) if line.startswith("links")]
    size = f"{66 * SMALL_BYTES / 1e3:.2f} kB"
    assert len(lines) == 1 and lines[0].startswith(f"links     {size} within the device, on 66 links; at most ")
    assert len(answer.plan.describe().splitlines()) == 2
