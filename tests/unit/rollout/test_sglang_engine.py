"""SGLang on the CPU, beside transformers: tokens, logprobs, stops, syncs between and within responses, death; and
the layouts of its ranks, recorded without it."""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlframe.rollout.sglang import layout as sglang_layout
from rlframe.rollout.sglang.border import SchedulerRank
from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.sglang.engine import SglangEngine
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.tools import plan_sync
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import ConfigError, EngineDied, WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import WeightSync
from rlframe.weight_sync.layout.boxes import Box, matrix_shape
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.plan.planner import Kind
from tests.rollout_models import make_requests
from tests.tiny_models import make as make_model
from unit.rollout.engine_trainer import (
    STOP_TOKENS,
    OneEngine,
    Trainer,
    make,
    nats,
    perturbed,
    run,
    synced,
    transformers_model,
)
from unit.rollout.recorded import replay

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.slow,
]
LONG = SamplingParams(max_tokens=400, min_tokens=400)
CLOSE = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[SglangEngine]:
    running = SglangEngine(SglangConfig(max_num_seqs=32), folder=folder, dtype=torch.float32, device="cpu")
    yield running
    running.close()


@dataclass
class Case:
    """The engine and its trainer, both at the checkpoint's weights, which are version 0."""

    engine: SglangEngine
    folder: Path
    weights: dict[str, Tensor]
    trainer: Trainer
    destination: OneEngine
    sync: WeightSync


@pytest.fixture
def case(engine: SglangEngine, folder: Path) -> Case:
    weights = load_file(folder / "model.safetensors")
    # Whatever the test before has left: a stream carries version 0, where direct copies would only compare.
    synced(engine, weights, transport="stream")
    return Case(engine, folder, weights, *synced(engine, weights))


def wait_for_tokens(engine: SglangEngine, count: int) -> None:
    """Until every running response has so many. Looks by way of pauses, which change nothing."""
    deadline = time.monotonic() + 60
    while True:
        engine.pause()
        counts = engine._flush()
        engine._all(SchedulerRank.proceed)
        if counts and all(each >= count for each in counts.values()):
            return
        assert time.monotonic() < deadline, "the engine samples"
        time.sleep(0.02)


def test_a_mixed_batch_has_logprobs_by_one_rule(case: Case):
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 5},
        {"temperature": 1.0, "top_k": 3},
    ]
    requests = [
        request
        for each in settings
        for request in make_requests(2, sampling=SamplingParams(max_tokens=10, min_tokens=10, **each))
    ]
    model = transformers_model(case.folder, case.weights)
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
        assert completion.spans == [Span(version=0, start=0, end=10)]
        assert completion.finish_reason is FinishReason.LENGTH


def test_with_the_same_seeds_it_samples_what_the_transformers_engine_samples(case: Case):
    """Every filter and every way to stop; the model's own defaults, which have a top_k, do nothing in either."""
    other = TransformersEngine(TransformersConfig(), folder=case.folder, dtype=torch.float32, device="cpu")
    other.gate.begin(0)
    other.gate.commit(0)
    assert case.engine.stop_tokens == other.stop_tokens == STOP_TOKENS
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "max_tokens": 30},
        {"max_tokens": 30},
        {"temperature": 0.7, "top_p": 0.8, "max_tokens": 20},
        {"temperature": 1.3, "top_k": 4, "max_tokens": 20},
        {"temperature": 0.9, "top_p": 0.7, "top_k": 9, "max_tokens": 20, "min_tokens": 9},
        {"temperature": 0.0, "max_tokens": 30, "min_tokens": 6},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0.0, "max_tokens": 30, "stop": ("w2",)},
        {"temperature": 0.0, "max_tokens": 30, "min_tokens": 4, "stop": ("w4", "w5 w")},
        {"max_tokens": 1},
    ]
    mine = case.engine.generate(
        [each for one in settings for each in make_requests(6, sampling=SamplingParams(**one), longest=8)]
    )
    theirs = [
        each for one in settings for each in other.generate(make_requests(6, sampling=SamplingParams(**one), longest=8))
    ]
    for one, another in zip(mine, theirs, strict=True):
        assert one.token_ids.tolist() == another.token_ids.tolist()
        assert one.finish_reason is another.finish_reason
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(another.logprobs), **CLOSE)
    assert {each.finish_reason for each in mine} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({len(each.token_ids.tolist()) for each in mine}) > 8


def test_a_sequence_may_have_every_position_of_the_model_and_no_more(case: Case):
    prompt = tuple(5 + index % 60 for index in range(1000))
    full = SamplingParams(max_tokens=24, min_tokens=24)
    (completion,) = case.engine.generate([GenerationRequest(token_ids=prompt, sampling=full, seed=0)])
    assert len(completion.token_ids.tolist()) == 24
    expected = nats(
        transformers_model(case.folder, case.weights),
        GenerationRequest(token_ids=prompt, sampling=full, seed=0),
        completion.token_ids.tolist(),
    )
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        case.engine.generate([GenerationRequest(token_ids=(), sampling=LONG, seed=0)])
    with pytest.raises(ValueError, match="625 tokens and a response of 400 exceed the 1024 positions"):
        case.engine.generate([GenerationRequest(token_ids=(5,) * 625, sampling=LONG, seed=0)])
    with pytest.raises(ValueError, match="sequences of 1 to 1023 tokens"):
        case.engine.score([(5,) * 1024])


def test_scores_are_those_of_transformers_at_temperature_1(case: Case):
    # 66 is the last of the vocabulary, which SGLang takes for another in its answers.
    sequences = [request.token_ids.tolist() for request in make_requests(5, sampling=LONG)] + [(7,), (66, 66, 5, 66)]
    model = transformers_model(case.folder, case.weights)
    for sequence, scores in zip(sequences, case.engine.score(sequences), strict=True):
        request = GenerationRequest(token_ids=sequence[:1], sampling=SamplingParams(), seed=0)
        expected = nats(model, request, list(sequence[1:])) if len(sequence) > 1 else torch.zeros(0)
        torch.testing.assert_close(torch.tensor(scores), expected, **CLOSE)


def test_abort_returns_what_there_is(case: Case):
    requests = make_requests(3, sampling=LONG)
    running = run(lambda: case.engine.generate(requests))
    wait_for_tokens(case.engine, 5)
    case.engine.abort()
    model = transformers_model(case.folder, case.weights)
    for request, completion in zip(requests, running.result(timeout=60), strict=True):
        assert completion.finish_reason is FinishReason.ABORT
        assert 5 <= len(completion.token_ids.tolist()) < 400
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    # Nothing of it is left: the same requests run to their end.
    short = [replace(request, sampling=SamplingParams(max_tokens=4, min_tokens=4)) for request in requests]
    assert {each.finish_reason for each in case.engine.generate(short)} == {FinishReason.LENGTH}


def test_an_abort_while_paused_returns_what_there_is(case: Case):
    requests = make_requests(2, sampling=LONG)
    running = run(lambda: case.engine.generate(requests))
    wait_for_tokens(case.engine, 5)
    case.engine.pause()
    case.engine.abort()
    for completion in running.result(timeout=60):
        assert completion.finish_reason is FinishReason.ABORT
        assert 5 <= len(completion.token_ids.tolist()) == len(completion.logprobs) < 400
    case.engine.resume()


def test_a_sync_within_responses_splits_them_at_the_token(case: Case):
    """Before the split every logprob is of the old weights; after it of the new ones, keys and values included."""
    requests = make_requests(3, sampling=SamplingParams(temperature=0.8, max_tokens=300, min_tokens=300))
    running = run(lambda: case.engine.generate(requests))
    wait_for_tokens(case.engine, 20)
    new = perturbed(case.weights, seed=1)
    case.trainer.train(new)
    counts: list[int] = []
    case.destination.after_pause = lambda: (time.sleep(0.3), counts.extend((case.engine._flush()).values()))
    case.sync.publish(version=1)
    old_model, new_model = transformers_model(case.folder, case.weights), transformers_model(case.folder, new)
    for request, completion in zip(requests, running.result(timeout=120), strict=True):
        before, after = completion.spans
        assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 300)
        assert before.end == after.start >= 20
        logprobs = torch.tensor(completion.logprobs)
        old, new_nats = (nats(model, request, completion.token_ids.tolist()) for model in (old_model, new_model))
        torch.testing.assert_close(logprobs[: before.end], old[: before.end], **CLOSE)
        torch.testing.assert_close(logprobs[after.start :], new_nats[after.start :], **CLOSE)
        assert abs(old[after.start] - logprobs[after.start]) > 1e-3
    # What was there a while after the pause is what the split says.
    assert sorted(counts) == sorted(each.spans[0].end for each in running.result())


def test_nothing_of_the_prefix_cache_outlives_a_sync(case: Case):
    prompt = tuple(5 + index % 60 for index in range(400))
    request = GenerationRequest(
        token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6), seed=0
    )
    case.engine.generate([request])
    new = perturbed(case.weights, seed=2)
    case.trainer.train(new)
    case.sync.publish(version=1)
    (completion,) = case.engine.generate([request])
    expected = nats(transformers_model(case.folder, new), request, completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    assert completion.spans == [Span(version=1, start=0, end=6)]


def test_a_stream_and_direct_copies_leave_the_same_weights_by_the_engines_own_checksums(case: Case):
    assert case.sync.choice.name == "shm"
    new = perturbed(case.weights, seed=3)
    started = case.engine.checksums()
    case.trainer.train(new)
    case.sync.publish(version=1)
    copied = case.engine.checksums()
    trainer, _, sync = synced(case.engine, case.weights, transport="stream")
    assert sync.choice.name == "stream over shm"
    assert case.engine.checksums() == started != copied
    trainer.train(new)
    sync.publish(version=1)
    assert case.engine.checksums() == copied
    request = make_requests(1, sampling=SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12))
    (completion,) = case.engine.generate(request)
    expected = nats(transformers_model(case.folder, new), request[0], completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


@pytest.mark.parametrize("fallback", [True, False])
def test_attention_writes_its_cache_itself_where_the_rotary_kernel_cannot(fallback: bool):
    from rlframe.rollout.sglang.worker import write_cache_apart

    attention: Any = torch.nn.Module()
    attention.compatible_with_fused_kv_buffer = True
    attention.rotary_emb = torch.nn.Module()
    attention.rotary_emb.use_fallback_kernel = fallback
    write_cache_apart(torch.nn.Sequential(torch.nn.Linear(2, 2), attention))
    assert attention.compatible_with_fused_kv_buffer is not fallback


def test_errors_of_a_rank_arrive_as_what_they_are(case: Case):
    with pytest.raises(WeightSyncFailed, match="connect on rank 0 of SGLang: AttributeError.*'transport'"):
        case.engine.on_ranks([RankCall.of(DestinationRank.connect, "not a link")])
    assert case.engine.is_alive()


def test_the_layout_recorded_without_an_engine_is_the_engines(
    engine: SglangEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    from sglang.srt.configs import model_config, update_config
    from sglang.srt.configs.load_config import LoadConfig

    plain = model_config.ModelConfig.from_server_args

    def padded(arguments: Any) -> Any:
        """Widths as SGLang has them on the CPU alone, whole blocks of 32: the experts' 48 become 64."""
        return update_config.adjust_config_with_unaligned_cpu_tp(plain(arguments), LoadConfig(), 1)

    monkeypatch.setattr(model_config.ModelConfig, "from_server_args", padded)
    (mine,) = sglang_layout.engine_layouts(folder, dtype=torch.float32)
    (info,) = engine.on_ranks([RankCall.of(DestinationRank.describe)])
    assert info.layout == mine


def test_a_scheduler_that_is_killed_fails_its_requests_and_takes_nothing_else_with_it(case: Case):
    """The last test of the engine, which is gone after it."""
    processes = psutil.Process(case.engine._host.process.pid).children(recursive=True)
    running = run(lambda: case.engine.generate(make_requests(2, sampling=LONG)))
    wait_for_tokens(case.engine, 5)
    next(each for each in processes if "scheduler" in " ".join(each.cmdline())).kill()
    with pytest.raises(EngineDied, match=r"the SGLang engine of process \d+ .* died during"):
        running.result(timeout=60)
    assert not case.engine.is_alive()
    case.engine.close()
    assert not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


# tp 4 has more ranks than the models have KV heads (2), and pads the vocabulary of 67.
SPLITS = [("qwen3", 2, False), ("qwen2", 4, False), ("llama_scaled", 4, False), ("qwen3_moe", 2, False)]
SPLITS += [("qwen3_moe", 4, True), ("mixtral", 2, True)]


@pytest.mark.parametrize(("name", "tp", "ep"), SPLITS, ids=str)
def test_the_recording_replays_what_sglang_loads(
    name: str, tp: int, ep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(name, tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    layouts = sglang_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=tp, ep=ep)
    assert len(layouts) == tp
    arguments = sglang_layout._arguments(tmp_path, dtype=torch.float32, tp=tp, ep=ep)
    # The same model, with memory.
    monkeypatch.setattr(sglang_layout, "without_memory", lambda dtype: nullcontext())
    for rank, layout in enumerate(layouts):
        with sglang_layout._play(rank, arguments) as model, torch.no_grad():
            model.load_weights(checkpoint.items())
            loaded = dict(model.named_parameters())
        replayed = replay(layout, checkpoint)
        assert loaded.keys() == replayed.keys()
        for parameter, value in loaded.items():
            assert torch.equal(value, replayed[parameter]), f"rank {rank}: {parameter}"
    for tensor, shape in layouts[0].tensors.items():
        assert (copies(layouts, tensor, shape) > 0).all(), f"{tensor} is nowhere in part"


def copies(layouts: list[MemoryLayout], tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """How many ranks hold each element, as a matrix."""
    counts = torch.zeros(matrix_shape(shape), dtype=torch.int64)
    for layout in layouts:
        for box in layout.boxes.get(tensor, ()):
            counts[box.row : box.row + box.rows, box.col : box.col + box.cols] += 1
    return counts


def test_the_second_of_two_ranks_holds_the_second_half_of_everything(tmp_path: Path) -> None:
    """4 heads and 2 KV heads of width 32, hidden 64, 8 experts of width 48, vocabulary 67 padded to 128."""
    make_model("qwen3_moe", tmp_path)
    sliced, whole = (
        sglang_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=2, ep=ep)[1] for ep in (False, True)
    )
    layer, qkv = "model.layers.1.", "model.layers.1.self_attn.qkv_proj.weight"
    w13, w2 = (f"{layer}mlp.experts.{name}_weight" for name in ("w13", "w2"))
    attention = [
        # 64 of the 128 rows of queries, and 32 of the 64 of keys and of values, follow each other in [128, 64].
        Box(f"{layer}self_attn.q_proj.weight", 64, 64, 0, 64, qkv, 0, 64, 1),
        Box(f"{layer}self_attn.k_proj.weight", 32, 32, 0, 64, qkv, 64 * 64, 64, 1),
        Box(f"{layer}self_attn.v_proj.weight", 32, 32, 0, 64, qkv, 96 * 64, 64, 1),
        # The columns of the second half's heads.
        Box(f"{layer}self_attn.o_proj.weight", 0, 64, 64, 64, f"{layer}self_attn.o_proj.weight", 0, 64, 1),
        # Of rows 64 to 127 the vocabulary has three.
        Box("model.embed_tokens.weight", 64, 3, 0, 64, "model.embed_tokens.weight", 0, 64, 1),
    ]
    expert = f"{layer}mlp.experts.5"
    # Expert 5 of [8, 2 * 24, 64] and of [8, 64, 24]: the second half of its 48 rows, or columns.
    halves = [
        Box(f"{expert}.gate_proj.weight", 24, 24, 0, 64, w13, 5 * 48 * 64, 64, 1),
        Box(f"{expert}.up_proj.weight", 24, 24, 0, 64, w13, (5 * 48 + 24) * 64, 64, 1),
        Box(f"{expert}.down_proj.weight", 0, 64, 24, 24, w2, 5 * 64 * 24, 24, 1),
    ]
    # Rank 1 has experts 4 to 7, so 5 is the second of [4, 2 * 48, 64] and of [4, 64, 48].
    wholes = [
        Box(f"{expert}.gate_proj.weight", 0, 48, 0, 64, w13, 96 * 64, 64, 1),
        Box(f"{expert}.up_proj.weight", 0, 48, 0, 64, w13, (96 + 48) * 64, 64, 1),
        Box(f"{expert}.down_proj.weight", 0, 64, 0, 48, w2, 64 * 48, 48, 1),
    ]
    for layout, boxes in ((sliced, attention + halves), (whole, attention + wholes)):
        assert [layout.boxes[box.tensor] for box in boxes] == [(box,) for box in boxes]
    assert f"{layer}mlp.experts.3.up_proj.weight" in sliced.boxes.keys() - whole.boxes.keys()


def test_plan_sync_plans_into_sglang(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    answer = plan_sync.solve(
        plan_sync.Case(model=str(tmp_path), train="d4e4", engine="sglang", tp=4, ep=True, dtype="float32")
    )
    # Trainer and engine share the experts out alike, and the trainer's ranks have everything else.
    assert not answer.fallback
    assert set(answer.plan.kind_bytes) == {Kind.DEVICE}


def test_a_process_with_an_engine_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import parallel_state

    make_model("qwen3", tmp_path)
    engine = object()
    monkeypatch.setattr(parallel_state, "_TP", engine)
    with pytest.raises(ConfigError, match="an engine runs in this process"):
        sglang_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=2)
    assert parallel_state._TP is engine
