"""Weight sync on GPUs: Megatron with Transformer Engine trains, vLLM or SGLang with CUDA graphs samples, and a synced
engine is what a fresh engine is that loads the exported checkpoint by the engine's own path."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from rlframe.algorithms.grpo import Grpo
from rlframe.loops.online import OnlineLoop
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.run.compose.online import online
from rlframe.run.compose.parts import Parts
from rlframe.run.load import load
from rlframe.types.rollout import Rollout, members
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from tests.multiprocess.program import LEARNING

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 261,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
GRAPHS = {
    "vllm": "{compilation_config:{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:[1,2,4,8,16]}}",
    "sglang": "{cuda_graph_bs_decode:[1,2,4,8,16],disable_prefill_cuda_graph:true}",
}
"""CUDA graphs of decoding, by engine; of vLLM without Inductor, whose compile time would be most of the test's."""
NOISE_NATS = {"vllm": 1e-6, "sglang": 0.05}
"""Of two runs of the same weights: SGLang's batches depend on when each request arrives, and bfloat16 on the batch."""
CASES = {
    "dense-d1-tp1-ipc": ("dense", "d1", {"tp": 1}, True, "cuda_ipc"),
    "moe-d1-tp1-ipc": ("moe", "d1", {"tp": 1}, True, "cuda_ipc"),
    "moe-d1-tp1-reload": ("moe", "d1", {"tp": 1}, True, "reload"),
    "dense-t2-tp2-ipc": ("dense", "d1t2", {"tp": 2}, True, "cuda_ipc"),
    "moe-e2-tp2-ipc": ("moe", "d2|ffn:d1t1e2", {"tp": 2}, True, "cuda_ipc"),
    "moe-p2-ep2-ipc": ("moe", "d1p2", {"tp": 2, "expert_parallel": True}, True, "cuda_ipc"),
    "dense-split-ipc": ("dense", "d1", {"tp": 1}, False, "cuda_ipc"),
    "moe-split-nccl": ("moe", "d1", {"tp": 1}, False, "nccl"),
    "moe-t2p2-tp4-ipc": ("moe", "d1t2p2|ffn:d1t1e2p2", {"tp": 4}, True, "cuda_ipc"),
    "moe-e2-split-tp2-nccl": ("moe", "d2|ffn:d1t1e2", {"tp": 2}, False, "nccl"),
    "sglang-dense-ipc": ("dense", "d1", {"name": "sglang", "tp": 1}, True, "cuda_ipc"),
    "sglang-moe-ipc": ("moe", "d1", {"name": "sglang", "tp": 1}, True, "cuda_ipc"),
    # As the embedded model, whose heads are narrower than SGLang's kernels are made for.
    "sglang-narrow-moe-ipc": ("narrow-moe", "d1", {"name": "sglang", "tp": 1}, True, "cuda_ipc"),
    "sglang-moe-reload": ("moe", "d1", {"name": "sglang", "tp": 1}, True, "reload"),
    "sglang-moe-split-nccl": ("moe", "d1", {"name": "sglang", "tp": 1}, False, "nccl"),
    "sglang-moe-e2-tp2-ipc": ("moe", "d2|ffn:d1t1e2", {"name": "sglang", "tp": 2}, True, "cuda_ipc"),
    "sglang-moe-p2-ep2-ipc": ("moe", "d1p2", {"name": "sglang", "tp": 2, "expert_parallel": True}, True, "cuda_ipc"),
}


def checkpoint(kind: str, folder: Path) -> Path:
    """A random model of `kind` with the tokenizer of the embedded one."""
    import transformers

    torch.manual_seed(0)
    shape = SHAPE | ({"head_dim": 32} if kind == "narrow-moe" else {})
    config = (
        transformers.Qwen3Config(**shape, tie_word_embeddings=True)
        if kind == "dense"
        else transformers.Qwen3MoeConfig(**shape, **EXPERTS, tie_word_embeddings=False)
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    embedded = resolve(ModelConfig(path="qwen3_moe_tiny"))
    for file in embedded.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    for file in embedded.glob("*.jinja"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@contextmanager
def running(
    folder: Path,
    model: Path,
    train: str,
    engine: dict,
    colocate: bool,
    transport: str,
    random_init: bool = False,
    **more: str,
) -> Iterator[OnlineLoop]:
    """The main job on GPUs, calibrated at version 0."""
    engine = dict(engine)
    name = engine.pop("name", "vllm")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    settings = LEARNING | {
        "output": folder,
        "model.path": model,
        "model.random_init": str(random_init).lower(),
        "train.parallel": train,
        "train.dtype": "bfloat16",
        "train.optimizer.lr": 1e-2,
        "cluster.device": "cuda",
        "cluster.colocate": str(colocate).lower(),
        "weight_sync.transport": transport,
        "rollout.num_engines": 1,
        "+rollout.engine_options": GRAPHS[name],
        "+rollout.max_model_len": 256,
        "+rollout.kv_cache_gb": 1,
        "rollout.max_tokens": 8,
    } | {f"+rollout.{key}": str(value).lower() for key, value in engine.items()} | more  # fmt: skip
    overrides = [f"rollout={name}", *(f"{key}={value}" for key, value in settings.items())]
    config = load("grpo_qwen3_moe", overrides)
    algorithm = Grpo(config.algorithm)
    with ExitStack() as stack:
        yield online(Parts(config, algorithm.requirements, stack), algorithm)


def greedy(loop: OnlineLoop) -> list[Rollout]:
    """Greedy answers to the held-out prompts."""
    prompts = loop.prompts.evaluation_prompts()
    return members(loop.attempts.generate(prompts, group_size=1, step=0, sampling=loop.evaluation_sets[0].sampling))


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    """Of each rollout, prompt and answer."""
    return [rollout.token_ids.tolist() for rollout in rollouts]


def engine_digests(loop: OnlineLoop) -> list[dict[str, int]]:
    """Of every parameter of the engine, by rank; not those of syncs, which have another seed in each run."""
    return loop.rollout.call(DestinationRank.snapshot)


@pytest.mark.parametrize("case", CASES)
def test_an_engine_after_syncs_equals_a_fresh_one_of_the_exported_checkpoint(case: str, tmp_path: Path) -> None:
    kind, train, engine, colocate, transport = CASES[case]
    noise = NOISE_NATS[engine.get("name", "vllm")]
    needed = max(engine["tp"], 1 if train == "d1" else 4 if "t2p2" in train else 2)
    needed += 0 if colocate else 1 if train == "d1" else 2
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs")
    model = checkpoint(kind, tmp_path / "initial")
    exported = tmp_path / "exported"
    exported.mkdir()
    with running(tmp_path / "run", model, train, engine, colocate, transport) as loop:
        before = greedy(loop)
        for step in (1, 2):
            loop.step(step)
        loop.weight_sync.restore()
        with loop.phase("evaluation", on=loop.rollout):
            after = greedy(loop)
        synced = engine_digests(loop)
        write_checkpoint(exported, loop.policy.export(torch.bfloat16))
        copy_sidecars(model, exported, dtype=torch.bfloat16)
    assert tokens(before) != tokens(after)
    assert {span.version for rollout in after for span in rollout.spans} == {2}
    with running(tmp_path / "fresh", exported, train, engine, colocate, transport) as loop:
        # `online` has calibrated: what the fresh engine loaded equals the trainer's load of the same export.
        fresh = greedy(loop)
        if transport != "reload":
            assert synced == engine_digests(loop)
    assert tokens(fresh) == tokens(after)
    for mine, theirs in zip(fresh, after, strict=True):
        assert mine.rollout_logprobs == pytest.approx(theirs.rollout_logprobs, abs=noise)


def test_automatic_choice_on_one_host_is_cuda_ipc(tmp_path: Path) -> None:
    model = checkpoint("dense", tmp_path / "initial")
    with running(tmp_path / "run", model, "d1", {"tp": 1}, True, "auto") as loop:
        assert "cuda_ipc" in str(loop.weight_sync.choice)
        again = WeightSync(loop.policy, loop.rollout, WeightSyncConfig(transport="shm"))
        with pytest.raises(WeightSyncFailed, match="shm works between parameters on the CPU"):
            again.connect()


@pytest.mark.parametrize("tp", [1, 2])
def test_trainer_and_engine_draw_the_same_random_weights(tp: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"needs {tp} GPUs")
    model = checkpoint("moe", tmp_path / "initial")
    # Calibration compares every tensor, so that reaching the inside is the proof.
    with running(tmp_path / "run", model, "d1", {"tp": tp}, True, "cuda_ipc", random_init=True) as loop:
        assert loop.weight_sync.policy_version == 0
