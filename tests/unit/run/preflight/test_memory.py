"""Memory of a rank and of a device: golden numbers worked by hand from the published dimensions."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.options import Attention, KernelConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.families.base import Family
from rlframe.models.families.qwen3 import FAMILY as QWEN3
from rlframe.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from rlframe.models.shards import parameters, shards_of_rank
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.run.preflight.activations import of_stage, recomputed_fraction
from rlframe.run.preflight.devices import KINDS, named
from rlframe.run.preflight.parts import Part, Phase, Process
from rlframe.run.preflight.plan import Plan, plan
from rlframe.run.preflight.weights import Counter
from tests.unit.run.preflight.models import MOE, QWEN3_4B, SPARSE, folder, planned

ATTENTION = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2 * 128
"""Parameters of a layer of Qwen3-30B-A3B: query, key, value and output matrices, and two norms of heads."""
EXPERT = 3 * 2048 * 768
EMBEDDING = 151936 * 2048


def part(found: Plan, phase: Phase, name: str) -> float:
    """Bytes of a part of the policy."""
    return next(each.bytes for role, each in found.devices[0].at(phase) if (role, each.name) == ("policy", name))


def names(found: Plan) -> set[str]:
    """The parts of the policy while it trains."""
    return {each.name for role, each in found.devices[0].at(Phase.TRAIN) if role == "policy"}


def test_parameters_of_a_rank_are_those_of_the_published_dimensions() -> None:
    counter = Counter(QWEN3_MOE, QWEN3_MOE.architecture(MOE))
    (whole,) = counter.stages(Parallel())
    layer = ATTENTION + 2 * 2048 + 128 * 2048
    assert whole.experts == 48 * 128 * EXPERT
    assert whole.dense == 48 * layer + 2 * EMBEDDING + 2048
    assert whole.all == 30_532_122_624
    (shared,) = counter.stages(Parallel(dp=4, ep=4))
    assert (shared.dense, shared.experts) == (whole.dense, whole.experts // 4)


@pytest.mark.parametrize("text", ["d2", "d1t2", "d2p2", "d2e2", "d1t2|ffn:d1t1e2", "d1p2t2v2"])
@pytest.mark.parametrize(
    ("family", "hf"), [(QWEN3, QWEN3_4B | {"num_hidden_layers": 4}), (QWEN3_MOE, MOE | {"num_hidden_layers": 4})]
)
def test_parameters_are_those_of_the_shapes_that_ranks_build(family: Family, hf: dict, text: str) -> None:
    parallel, architecture = Parallel.parse(text), family.architecture(hf)
    if parallel.ep > 1 and not architecture.num_experts:
        pytest.skip("dense")
    sizes = {name: getattr(parallel, name) for name in ("dp", "tp", "cp", "ep", "etp")}
    for stage in Counter(family, architecture).stages(parallel):
        rank = stage.stage * parallel.tp * parallel.cp * parallel.dp
        shards = shards_of_rank(architecture, rank, **sizes, **parallel.stages)
        built = {name: math.prod(shape) for name, shape in parameters(family, architecture, shards).items()}
        assert stage.experts == sum(size for name, size in built.items() if ".experts." in name)
        assert stage.all == sum(built.values())


def test_an_adapter_of_rank_r_has_r_numbers_for_each_row_and_column() -> None:
    counter = Counter(QWEN3, QWEN3.architecture(QWEN3_4B))
    (found,) = counter.stages(Parallel(), LoraConfig(rank=8, target_modules=["q_proj", "linear_fc2"]))
    assert found.trained_dense == 36 * 8 * ((2560 + 4096) + (9728 + 2560))
    # Megatron keeps queries, keys and values in one weight, which is merged whole.
    assert found.adapted == 36 * (2560 * (4096 + 2 * 1024) + 9728 * 2560)


def test_each_tensor_parallel_rank_has_one_half_of_an_adapter_whole() -> None:
    counter = Counter(QWEN3, QWEN3.architecture(QWEN3_4B))
    found, *_ = counter.stages(Parallel(tp=2), LoraConfig(rank=8, target_modules=["q_proj", "linear_fc2"]))
    assert found.trained_dense == 36 * 8 * ((2560 + 4096 // 2) + (9728 // 2 + 2560))


def test_modules_to_save_are_trained_in_full_in_every_stage_that_holds_them(tmp_path: Path) -> None:
    counter = Counter(QWEN3, QWEN3.architecture(QWEN3_4B))
    config = LoraConfig(rank=8, target_modules=["q_proj"], modules_to_save=["embed_tokens", "q_norm"])
    stages = counter.stages(Parallel(pp=2), config)
    # The last stage has a copy of the tied embedding.
    saved = 151936 * 2560 + 18 * 128
    assert [stage.saved for stage in stages] == [saved, saved]
    assert [stage.trained_dense for stage in stages] == [saved + 18 * 8 * (2560 + 4096)] * 2
    overrides = ("train.parallel=d1", "+train.lora.rank=8", "+train.lora.modules_to_save=[embed_tokens]")
    whole = planned(tmp_path / "a", QWEN3_4B, *overrides)
    (stage,) = whole.trainer.stages()
    assert part(whole, Phase.TRAIN, "gradients") == 4 * stage.trained_dense > 4 * 151936 * 2560
    without = planned(tmp_path / "a", QWEN3_4B, *overrides[:2])
    assert "gradient of the output layer" not in names(without)
    assert part(whole, Phase.TRAIN, "gradient of the output layer") == 2 * 151936 * 2560


def test_the_head_of_values_is_trained_beside_adapters() -> None:
    counter = Counter(QWEN3, QWEN3.architecture(QWEN3_4B).with_outputs(1))
    (stage,) = counter.stages(Parallel(), LoraConfig(rank=8, target_modules=["q_proj"]))
    assert (stage.saved, stage.trained_dense) == (2560, 2560 + 36 * 8 * (2560 + 4096))


def test_adapters_that_engines_receive_unmerged_have_no_merged_copy_of_their_weights(tmp_path: Path) -> None:
    settings = ("train.parallel=d1", "+train.lora.rank=8", "rollout.sleep_level=1")
    merged = planned(tmp_path / "a", QWEN3_4B, *settings)
    apart = planned(tmp_path / "a", QWEN3_4B, *settings, "weight_sync.lora=adapter")
    # Of a layer all weights but the norms have adapters.
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728
    assert part(merged, Phase.TRAIN, "merged adapters") == 2 * 36 * layer
    assert "merged adapters" not in names(apart)


def test_without_engines_nobody_holds_merged_weights(tmp_path: Path) -> None:
    model = f"model.path={folder(tmp_path / 'a', QWEN3_4B)}"
    run = load("sft_qwen3_8b", [model, "train.parallel=d1", "+train.lora.rank=8"])
    assert "merged adapters" not in names(plan(run, algorithm_of(run), KINDS["h200"]))
    with_critic = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1", "+train.lora.rank=8", "algorithm=ppo")
    held = {role for role, each in with_critic.devices[0].at(Phase.TRAIN) if each.name == "merged adapters"}
    assert held == {"policy"}


def test_a_stage_without_layers_trains_no_adapter() -> None:
    counter = Counter(QWEN3, QWEN3.architecture(QWEN3_4B | {"num_hidden_layers": 4}))
    parallel = Parallel(pp=3, pipeline_layout="Ett|tt|L")
    *_, last = counter.stages(parallel, LoraConfig(rank=8))
    assert (last.layers, last.trained_dense, last.trained_experts, last.adapted) == ((), 0, 0, 0)


def test_states_take_eighteen_bytes_a_parameter_and_are_shared_by_the_ranks_that_hold_copies(tmp_path: Path) -> None:
    one = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1")
    parameters = 4_022_468_096
    assert part(one, Phase.TRAIN, "parameters") == 2 * parameters
    assert part(one, Phase.TRAIN, "gradients") == 4 * parameters
    assert part(one, Phase.TRAIN, "main weights") == 4 * parameters
    assert part(one, Phase.TRAIN, "moments") == 8 * parameters
    four = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d4", "train.optimizer.precision_aware=true")
    assert part(four, Phase.TRAIN, "gradients") == 4 * parameters
    assert part(four, Phase.TRAIN, "main weights") == 2 * parameters / 4
    assert part(four, Phase.TRAIN, "moments") == 8 * parameters / 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["d1", "d1t2", "d1p2", "d1p3"])
def test_layers_alone_have_weights_in_8_bits(tmp_path: Path, layout: str, tied: bool) -> None:
    hf = QWEN3_4B | {"tie_word_embeddings": tied}
    found = planned(tmp_path / "a", hf, f"train.parallel={layout}", "train.fp8.recipe=blockwise").trainer
    norms = 1.001
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728
    each = 36 * layer / found.parallel.tp / found.parallel.pp
    for stage in found.stages():
        assert each <= found.matrices(stage) < norms * each
        states = {part.name: part.bytes for part in found.states(stage)}
        assert states["weights in 8 bits, by rows and by columns"] == 2 * found.matrices(stage)
    critic = replace(
        found,
        architecture=found.architecture.with_outputs(1),
        counter=Counter(QWEN3, found.architecture.with_outputs(1)),
    )
    assert all(each <= critic.matrices(stage) < norms * each for stage in critic.stages())


def test_a_matrix_of_muon_has_a_momentum_alone(tmp_path: Path) -> None:
    four = planned(tmp_path / "a", MOE, "train.parallel=d8e4", "train.optimizer.name=muon")
    experts = 48 * 128 * EXPERT / 4
    attention = 48 * (ATTENTION - 2 * 128)
    others = 48 * (2 * 128 + 2 * 2048 + 128 * 2048) + 2 * EMBEDDING + 2048
    assert part(four, Phase.TRAIN, "moments") == 4 * (attention / 8 + experts / 2) + 8 * others / 8


def test_experts_are_shared_by_their_own_copies(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", MOE, "train.parallel=d8e4")
    experts = 48 * 128 * EXPERT / 4
    dense = 48 * (ATTENTION + 2 * 2048 + 128 * 2048) + 2 * EMBEDDING + 2048
    assert part(found, Phase.TRAIN, "moments") == 8 * (dense / 8 + experts / 2)


def test_a_layer_without_recomputation_keeps_what_its_products_and_norms_read(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1", "train.max_tokens_per_microbatch=16384")
    hidden, queries, keys, width = 2560, 32 * 128, 8 * 128, 9728
    # Two norms, in and out; queries and keys before their norms; queries, keys, values; output; logarithms; SwiGLU.
    layer = 4 * hidden * 2 + (queries + keys) * 2 + (queries + 2 * keys) * 2 + queries * 2 + 32 * 4 + 3 * width * 2
    assert part(found, Phase.TRAIN, "activations") == 16384 * 36 * layer
    assert part(found, Phase.TRAIN, "logits") == 16384 * 151936 * 2


def test_keys_of_long_prompts_are_kept_once_where_attention_to_them_is_a_call_of_its_own(tmp_path: Path) -> None:
    architecture = planned(tmp_path, QWEN3_4B, "train.parallel=d1").architecture

    def again(keys: float, cuda: bool = True, **settings: Any) -> float:
        """Bytes of keys and values a token beyond those of a pack that shares nothing."""
        rest = {"tokens": 1, "cuda": cuda, "chunks": [(0,)]}
        train = TrainConfig(**settings)
        return (
            of_stage(architecture, train, keys_per_token=keys, **rest).kept - of_stage(architecture, train, **rest).kept
        )

    token = 2 * 8 * 128 * 2
    assert again(1.5) == token / 2
    assert again(2.0) == again(4.0) == 0
    assert again(4.0, deterministic=True) == 3 * token
    assert again(4.0, kernels=KernelConfig(attention=Attention.FLASH)) == 3 * token
    assert again(4.0, cuda=False) == 3 * token


def test_tensor_parallel_ranks_share_activations_and_pipeline_stages_hold_several_micro_batches(tmp_path: Path) -> None:
    whole = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1")
    split = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1t4")
    assert part(split, Phase.TRAIN, "activations") == pytest.approx(part(whole, Phase.TRAIN, "activations") / 4)
    staged = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1p2")
    first, last = (staged.trainer.rank(stage) for stage in staged.trainer.stages())
    kept = {part.name: part.bytes for part in first.work[Phase.TRAIN]}["activations"]
    assert kept == pytest.approx(part(whole, Phase.TRAIN, "activations"))
    assert {part.name: part.bytes for part in last.work[Phase.TRAIN]}["activations"] == pytest.approx(kept / 2)


def test_the_last_stage_of_an_interleaved_pipeline_holds_several_micro_batches_too(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1p4v3")
    # Of 3 chunks each: two rounds of 4, twice the stages behind, and the one at work.
    chunks = [8 + 2 * behind + 1 for behind in (3, 2, 1, 0)]
    assert [found.trainer.in_flight(stage) for stage in range(4)] == pytest.approx([each / 3 for each in chunks])
    few = replace(found.trainer, microbatches=4)
    assert [few.in_flight(stage) for stage in range(4)] == pytest.approx([4, 4, 11 / 3, 3])


def test_each_chunk_of_a_stage_recomputes_its_own_first_layers(tmp_path: Path) -> None:
    settings = ("train.recompute=full", "train.recompute_options.method=block", "train.recompute_options.layers=3")
    found = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1p2v3", *settings).trainer
    without = planned(tmp_path / "a", QWEN3_4B, "train.parallel=d1p2v3").trainer
    tokens, each = found.tokens, without.activations(without.stages()[0]).kept / 18
    # Three chunks of six layers, of which three keep their input alone.
    assert found.activations(found.stages()[0]).kept == pytest.approx(9 * tokens * 2560 * 2 + 9 * each)
    assert recomputed_fraction(found.train, found.stages()[0].chunks) == 1 / 2


def test_a_device_has_the_speeds_of_its_kind_whatever_the_driver_calls_it() -> None:
    found = named("NVIDIA H200", 150_000_000_000)
    assert (found.memory_bytes, found.speeds) == (150_000_000_000, KINDS["h200"].speeds)
    assert named("NVIDIA A100-SXM4-40GB", 1).speeds in (KINDS["a100"].speeds, KINDS["a100-40gb"].speeds)
    assert named("Something else", 1).speeds is None and not named("Something else", 1).is_cpu


def test_an_engine_claims_its_part_of_the_device_and_its_cache_is_the_rest(tmp_path: Path) -> None:
    found = planned(tmp_path / "a", QWEN3_4B, "rollout.gpu_memory_utilization=0.5")
    engine = found.engine
    assert engine is not None and engine.token_bytes == 147_456
    claimed = sum(part.bytes for part in engine.process().at(Phase.GENERATION) if part.name != "CUDA graphs")
    assert claimed == pytest.approx(found.accelerator.memory_bytes / 2)


def test_what_drafts_has_weights_and_a_cache_in_the_engine(tmp_path: Path) -> None:
    alone = planned(tmp_path / "a", QWEN3_4B)
    draft = folder(tmp_path / "draft", QWEN3_4B | {"num_hidden_layers": 18})
    speculative = ["++rollout.speculative.method=draft_model", f"++rollout.speculative.model={draft}"]
    found = planned(tmp_path / "a", QWEN3_4B, *speculative, "rollout.sleep_level=1")
    assert alone.engine is not None and found.engine is not None
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    weights = 2 * (151936 * 2560 + 18 * layer + 2560)
    parts = {each.name: each.bytes for role, each in found.devices[0].at(Phase.GENERATION) if role == "engines"}
    assert parts["weights that draft"] == weights
    assert parts["key-value cache"] == alone.engine.cache_bytes - weights
    # Keys and values of 36 layers, and of 18 that draft.
    assert found.engine.cache_tokens == int(parts["key-value cache"] / (54 * 2 * 8 * 128 * 2))
    # A family that nobody knows is left to the engine.
    folder(tmp_path / "draft", {"model_type": "unheard_of"})
    unknown = planned(tmp_path / "a", QWEN3_4B, *speculative).engine
    assert unknown is not None and unknown.drafter is None


def test_an_engine_that_drafts_by_the_models_own_head_holds_it(tmp_path: Path) -> None:
    hf = {key: value for key, value in SPARSE.items() if not key.startswith("index_")}
    hf |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    found = planned(tmp_path / "a", hf, "++rollout.speculative.method=mtp", "rollout.tp=16").engine
    assert found is not None and found.drafter is not None
    # 257 experts, latent attention, and what joins a state with a token; embedding and output layer are the model's.
    attention = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    expected = 257 * 3 * 7168 * 2048 + attention + 2 * 7168**2
    assert found.drafter.parameters == pytest.approx(expected, rel=0.001)
    assert found.cached_bytes == found.token_bytes * 62 / 61


def test_an_engine_that_never_sleeps_holds_its_cache_beside_the_policy(tmp_path: Path) -> None:
    never = ("rollout.sleep_level=0", "rollout.kv_cache_gb=20")
    sleeps, stays = (planned(tmp_path / "a", QWEN3_4B, *settings) for settings in ((), never))
    freed = {phase: stays.devices[0].bytes_at(phase) - sleeps.devices[0].bytes_at(phase) for phase in stays.phases}
    assert stays.engine is not None and stays.engine.cache_bytes == 20e9
    assert freed[Phase.TRAIN] == pytest.approx(20e9 + 2 * 4_022_468_096 + 1.5e9)
    assert freed[Phase.SYNC] == pytest.approx(20e9)


def test_a_process_that_does_not_sleep_keeps_the_memory_of_its_work() -> None:
    work = {Phase.TRAIN: (Part("activations", 5.0),), Phase.LOGPROBS: (Part("logits", 3.0),)}
    awake = Process(role="policy", resident=(Part("parameters", 2.0),), work=work)
    assert [sum(part.bytes for part in awake.at(phase)) for phase in (Phase.TRAIN, Phase.GENERATION)] == [7.0, 7.0]
    sleeper = Process(role="policy", resident=(Part("parameters", 2.0),), asleep=(Part("parameters", 1.0),), work=work)
    assert sum(part.bytes for part in sleeper.at(Phase.GENERATION)) == 1.0


def test_main_weights_and_moments_that_wait_in_host_memory_leave_the_device(tmp_path: Path) -> None:
    overrides = ("rollout.gpu_memory_utilization=0.5", "train.recompute=full")
    stays = planned(tmp_path / "a", QWEN3_4B, *overrides)
    sleeps = planned(tmp_path / "a", QWEN3_4B, *overrides, "train.offload_optimizer=true")
    freed = stays.devices[0].bytes_at(Phase.GENERATION) - sleeps.devices[0].bytes_at(Phase.GENERATION)
    transient = sum(part.bytes for part in stays.trainer.process().work[Phase.TRAIN])
    assert freed == pytest.approx(16 * 4_022_468_096 + transient)
    assert sleeps.host.waiting_bytes - stays.host.waiting_bytes == 12 * 4_022_468_096
    critic = planned(
        tmp_path / "a", QWEN3_4B, *overrides, "train.offload_optimizer=true", "algorithm=ppo", "algorithm.group_size=1"
    )
    # The critic's head has one output in the place of none: the embeddings are tied.
    assert critic.host.waiting_bytes == 12 * (2 * 4_022_468_096 + 2560)
    releases = planned(tmp_path / "a", QWEN3_4B, *overrides, "train.release_memory=true")
    freed = stays.devices[0].bytes_at(Phase.GENERATION) - releases.devices[0].bytes_at(Phase.GENERATION)
    assert (
        freed == pytest.approx(4 * 4_022_468_096 + transient)
        and releases.host.waiting_bytes == stays.host.waiting_bytes
    )
    assert stays.step_seconds["train"] < releases.step_seconds["train"] < sleeps.step_seconds["train"]


def test_a_reference_that_follows_the_policy_has_its_float32_values_in_host_memory_and_in_checkpoints(
    tmp_path: Path,
) -> None:
    settings = ("train.parallel=d2", "algorithm.kl_coefficient=0.1")
    stays = planned(tmp_path / "a", QWEN3_4B, *settings)
    follows = planned(tmp_path / "a", QWEN3_4B, *settings, "algorithm.reference_update.every_steps=2")
    assert stays.host.waiting_bytes == 2 * 2 * 4_022_468_096
    assert follows.host.waiting_bytes - stays.host.waiting_bytes == 2 * 4 * 4_022_468_096
    assert follows.host.checkpoint_copy_bytes - stays.host.checkpoint_copy_bytes == 2 * 4 * 4_022_468_096


def test_weights_that_are_held_for_engines_are_once_in_host_memory(tmp_path: Path) -> None:
    plain, held = (
        planned(tmp_path / "a", QWEN3_4B, "train.parallel=t2d2", f"weight_sync.hold={hold}")
        for hold in ("none", "host")
    )
    # By hand: all weights in two bytes, whatever the number of ranks.
    assert held.host.waiting_bytes - plain.host.waiting_bytes == 2 * 4_022_468_096


def test_weights_of_engines_asleep_wait_in_host_memory(tmp_path: Path) -> None:
    settings = ("train.parallel=d2", "rollout.num_engines=2")
    waiting = [
        planned(tmp_path / "a", QWEN3_4B, *settings, f"rollout.sleep_level={level}").host.waiting_bytes
        for level in (0, 1, 2)
    ]
    assert waiting == [0, 2 * 2 * 4_022_468_096, 0]


def test_a_long_sequence_keeps_its_layers_inputs_on_the_host_and_few_logits(tmp_path: Path) -> None:
    settings = ("train.parallel=c2", "train.max_tokens_per_microbatch=65536", "train.recompute=full")
    tokens, hidden, vocabulary = 65536, 2560, 151936
    plain = planned(tmp_path / "a", QWEN3_4B, *settings, "rollout.max_tokens=130000")
    whole = plain.trainer
    assert part(plain, Phase.TRAIN, "logits") == whole.tokens * vocabulary * 2
    long = replace(
        plain.run.train, offload_activations=True, logits_chunk_tokens=4096, max_tokens_per_microbatch=tokens
    )
    memory = replace(whole, train=long, tokens=tokens, microbatches=1)
    kept = {each.name: each.bytes for each in memory.process().at(Phase.TRAIN)}
    # Of 36 inputs two are on the device; each is pinned in the next power of two of its bytes.
    assert kept["activations"] == 2 * tokens * hidden * 2
    assert memory.host_activations() == 36 * 2**29 and 2**28 < tokens * hidden * 2 <= 2**29
    (logits, states) = memory._end(memory.stages()[0])
    assert logits == 4096 * vocabulary * 2
    assert states == 4 * tokens * hidden * 2


def test_float32_logits_take_twice_the_memory_and_their_gradient_is_rounded_once_more(tmp_path: Path) -> None:
    settings = ("train.parallel=d1", "train.recompute=full")
    plain, float32 = (
        planned(tmp_path, QWEN3_4B, *settings, f"model.float32_logits={each}") for each in ("false", "true")
    )
    size = plain.trainer.tokens * 151936 * 2
    gradient = "gradient of the output layer"
    assert (part(plain, Phase.TRAIN, "logits"), part(float32, Phase.TRAIN, "logits")) == (size, 2 * size)
    assert part(float32, Phase.TRAIN, gradient) == part(plain, Phase.TRAIN, gradient) + size


def test_masks_of_sparse_attention_are_kept_by_every_layer_whatever_is_recomputed(tmp_path: Path) -> None:
    name = "masks of sparse attention"
    settings = (
        "train.parallel=d1",
        "train.max_tokens_per_microbatch=16384",
        "train.num_minibatches=2",
        "rollout.max_tokens=8192",
    )
    plans = [planned(tmp_path, SPARSE, *settings, f"train.recompute={recompute}") for recompute in ("none", "full")]
    layers, tokens, length = (
        plans[0].architecture.num_layers, plans[0].trainer.tokens, plans[0].workload.sequence_tokens,
    )  # fmt: skip
    assert tokens > length > 2048
    # A byte for each query, key and layer, and 2 of what is added to the scores: by each layer, or by the one at work.
    assert part(plans[0], Phase.TRAIN, name) == tokens * length * (layers + layers * 2)
    assert part(plans[1], Phase.TRAIN, name) == tokens * length * (layers + 2)
    assert part(plans[0], Phase.LOGPROBS, name) == tokens * length * (layers + 2)
    seen = planned(tmp_path, SPARSE | {"index_topk": length}, *settings)
    assert not [each for _, each in seen.devices[0].at(Phase.TRAIN) if each.name == name], "all keys are seen"


def test_engines_that_share_a_device_have_weights_and_caches_each(tmp_path: Path) -> None:
    cache = ("rollout.kv_cache_gb=40", "rollout.max_tokens=256", "prompts_per_step=16", "train.parallel=d1")
    one = planned(tmp_path / "a", QWEN3_4B, *cache, "rollout.num_engines=1")
    two = planned(tmp_path / "a", QWEN3_4B, *cache, "rollout.num_engines=2", "rollout.engines_per_device=2")
    assert one.engine and two.engine and one.num_devices == two.num_devices == 1
    assert two.engine.sequences == one.engine.sequences / 2
    held = [
        {part.name: part.bytes for role, part in each.devices[0].at(Phase.GENERATION) if role == "engines"}
        for each in (one, two)
    ]
    assert held[0]["weights"] == 2 * 4_022_468_096 and held[0]["key-value cache"] == 40e9
    assert held[1] == {name: 2 * size for name, size in held[0].items()}
    # Half of the responses each, at half of the device's speed.
    assert two.step_seconds["generation"] >= one.step_seconds["generation"]
