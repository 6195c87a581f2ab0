"""Options that must not change what is learned do not, and those of experts change it by the amount they say."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.options import (
    CommunicationConfig,
    Dispatcher,
    MoeConfig,
    Recompute,
    RecomputeConfig,
    RecomputeMethod,
)
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.models.config import ModelConfig
from rlframe.types.batch import Sequences
from rlframe.utils.errors import RlframeError
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.test_layouts import Weighted, assemble, exported_gradients, on_disk
from tests.tiny_models import make

# Sequences of each micro-batch. Each has an even number of tokens, so that two tensor-parallel ranks need no padding.
MICROBATCHES = [[6, 4], [8], [2, 12], [10]]
AUX, Z = 0.3, 0.2
RATE = 0.01
EXPERTS, TOPK, LAYERS = 8, 2, 2
OVERLAP = CommunicationConfig(overlap_grad_reduce=True, overlap_param_gather=True, bucket_parameters=4000)
WARMED = "warmed"
"""The case whose ranks warm up first."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    WARMED: {},
    "again": {"deterministic": True},
    "overlap": {"communication": OVERLAP, "epochs_per_batch": 2},
    "sleep": {"offload_optimizer": True},
    "block": {
        "recompute": Recompute.FULL,
        "recompute_options": RecomputeConfig(method=RecomputeMethod.BLOCK, layers=1),
    },
    "selective": {"recompute": Recompute.SELECTIVE, "recompute_options": RecomputeConfig(modules=["moe", "core_attn"])},
    "allgather": {"moe": MoeConfig(dispatcher=Dispatcher.ALLGATHER), "parallel": "d1t2|ffn:d1t1e2"},
    "roomy": {"moe": MoeConfig(capacity_factor=8.0, allow_token_drop=True)},
    "narrow": {"moe": MoeConfig(capacity_factor=0.5, allow_token_drop=True)},
    "frozen": {"moe": MoeConfig(freeze_router=True)},
}
SAME_BITS = [WARMED, "again", "overlap", "sleep", "block", "selective"]
SAME_NUMBERS = ["allgather", "roomy"]


PLACEHOLDERS = "transformer_engine.pytorch.module.base"
"""The module of Transformer Engine that keeps placeholders of gradients. It is not there on a CPU."""


def microbatch(lengths: list[int], seed: int) -> Microbatch:
    """Random tokens with uneven weights."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    batch = Sequences(
        token_ids=torch.randint(0, 67, (total,), generator=generator),
        lengths=torch.tensor(lengths),
        loss_mask=torch.ones(total, dtype=torch.bool),
    )
    weights = torch.rand(total, generator=generator) / 10
    weights[torch.cumsum(batch.lengths, 0) - batch.lengths] = 0.0
    return Microbatch(batch=batch, weights=weights)


def everything() -> list[Microbatch]:
    """All micro-batches of an optimizer step."""
    return [microbatch(lengths, seed) for seed, lengths in enumerate(MICROBATCHES)]


def mine(trainer: Any) -> list[Microbatch]:
    """This rank's micro-batches: half of them each with two data-parallel ranks."""
    dp = Parallel.parse(trainer.setup.train.parallel).dp
    count = len(MICROBATCHES) // dp
    return everything()[count * trainer.coordinates.dp_rank :][:count]


def start(
    rank: int,
    init_method: str,
    folder: str,
    *,
    dtype: str = "float32",
    skip_norm_above: float | None = None,
    with_reference: bool = False,
    **train: Any,
) -> Any:
    """A Trainer on this rank."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415
    from rlframe.megatron.worker import environment  # noqa: PLC0415

    # Nothing is clipped: the norm adds up shards in an order that buckets change, by the last bit.
    optimizer = OptimizerConfig(lr=1e-2, clip_grad=1e9, skip_norm_above=skip_norm_above)
    config = TrainConfig(dtype=dtype, optimizer=optimizer, **train)
    environment.prepare(config)
    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    setup = TrainerSetup(
        rank=rank, init_method=init_method, device=device, model=ModelConfig(path=folder), train=config, seed=0,
        temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=with_reference,
    )  # fmt: skip
    return Trainer(setup)


def on_rank(rank: int, init_method: str, folder: str, with_biases: str) -> dict[str, Any]:
    """What this rank has to show: cases of two optimizer steps, then gradients of the balancing losses."""
    found: dict[str, Any] = {}
    for name, options in CASES.items():
        trainer = start(rank, f"{init_method}{name}", folder, **{"parallel": "d2e2"} | options)
        if name == WARMED:
            trainer.warm_up()
        found[name] = two_steps(trainer, mine(trainer))
        torch.use_deterministic_algorithms(False)
        shutdown()
    for layout in ("d2e2", "d1t2"):
        balanced = MoeConfig(aux_loss_coefficient=AUX, z_loss_coefficient=Z)
        trainer = start(rank, f"{init_method}{layout}", folder, parallel=layout, moe=balanced)
        found[layout] = balanced_gradients(trainer, mine(trainer), balanced)
        shutdown()
    moving: dict[str, Any] = {"parallel": "d2", "moe": MoeConfig(bias_update_rate=RATE)}
    trainer = start(rank, f"{init_method}biases", with_biases, **moving, with_reference=True)
    found["biases"] = moved_biases(trainer, mine(trainer))
    found["reference"] = kept_reference(trainer, mine(trainer))
    shutdown()
    whole = MoeConfig(bias_update_rate=RATE, aux_loss_coefficient=AUX, z_loss_coefficient=Z)
    interleaved = {"parallel": Parallel(pp=2, pipeline_layout="E|t|t|L"), "moe": whole}
    trainer = start(rank, f"{init_method}skipping", with_biases, **interleaved, skip_norm_above=1e-9)
    found["filling"] = norms_of_skipped_steps(trainer)
    found["skipping"] = changed_by_no_step(trainer, mine(trainer))
    shutdown()
    summed = CommunicationConfig(reduce_in_float32=False)
    trainer = start(rank, f"{init_method}summed", folder, parallel="d2e2", dtype="bfloat16", communication=summed)
    trainer.train([mine(trainer)], Weighted(), first_step=0)
    found["gradients of main weights"] = bytes_of_gradients(trainer)
    shutdown()
    return found


def shutdown() -> None:
    """Leave the groups, so that the next case can make others."""
    from rlframe.megatron.worker import parallel  # noqa: PLC0415 - see start

    parallel.shutdown()


def two_steps(trainer: Any, own: list[Microbatch]) -> dict[str, Any]:
    """Metrics and weights after two optimizer steps; between them, where there is one, a sleep."""
    if trainer.sleeping is None:
        results = trainer.train([own, own[::-1]], Weighted(), first_step=0)
        slept = None
    else:
        results = trainer.train([own], Weighted(), first_step=0)
        slept = sleep_and_wake(trainer)
        results += trainer.train([own[::-1]], Weighted(), first_step=1)
    return {
        "metrics": [{key: metric.value for key, metric in step.metrics.items()} for step in results],
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
        "slept": slept,
    }


def sleep_and_wake(trainer: Any) -> dict[str, Any]:
    """What a sleep says, what it leaves, and whether parameters stay readable where they are."""
    from rlframe.megatron.worker.offload import gradient_storages, parts  # noqa: PLC0415 - see start

    before = trainer.export(list(trainer.layout.tensors), torch.float32)
    places = {name: value.data_ptr() for name, value in trainer.model.parameters.items()}
    placeholders = {(3, 2): torch.zeros(3, 2)}
    sys.modules[PLACEHOLDERS] = SimpleNamespace(_dummy_wgrads=placeholders)  # pyright: ignore[reportArgumentType]
    moved = trainer.sleep()
    del sys.modules[PLACEHOLDERS]
    during = trainer.export(list(trainer.layout.tensors), torch.float32)
    moments = [state["exp_avg"] for part in parts(trainer.optimizer) for state in part.state.values()]
    slept = {
        "moved": moved,
        "placeholders": len(placeholders),
        "left": sum(storage.nbytes() for storage in gradient_storages(trainer.model))
        + sum(moment.untyped_storage().nbytes() for moment in moments),
        "elements": sum(moment.numel() for moment in moments),
        "gradient_elements": sum(
            buffer.numel
            for chunk in trainer.model.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        "same": all(
            torch.equal(a[1], b[1]) for name in before for a, b in zip(before[name], during[name], strict=True)
        ),
        "places": places == {name: value.data_ptr() for name, value in trainer.model.parameters.items()},
    }
    # Whoever takes the memory in the meantime leaves something else in it.
    others = [torch.full((moment.numel(),), 7.0) for moment in moments]
    del others
    slept["woken"] = trainer.wake()
    return slept


def balanced_gradients(trainer: Any, own: list[Microbatch], moe: MoeConfig) -> dict[str, Any]:
    """Gradients of one step with both losses, and what the counts say."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see start
    from rlframe.megatron.worker.expert_load import balance  # noqa: PLC0415

    balance(trainer.model, moe, own)
    forward.accumulate_gradients(trainer.model, own, Weighted(), temperature=1.0)
    load = {key: metric.value for key, metric in trainer.expert_load.take().items()}
    return {"gradients": exported_gradients(trainer), "load": load}


def moved_biases(trainer: Any, own: list[Microbatch]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each layer with experts the routing bias before and after one step's gradients, and its experts' tokens."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see start

    biases = {name: bias for name, bias in trainer.model.parameters.items() if name.endswith("expert_bias")}
    before = {name: bias.clone() for name, bias in biases.items()}
    forward.accumulate_gradients(trainer.model, own, Weighted(), temperature=1.0)
    tokens = trainer.expert_load.counts.clone()
    torch.distributed.all_reduce(tokens)
    return [(before[name], bias.clone(), tokens[int(name.split(".")[2])]) for name, bias in biases.items()]


def kept_reference(trainer: Any, own: list[Microbatch]) -> list[bool]:
    """Whether the reference's logprobs, and not the policy's, are after a step what they were before."""
    sides = [{"reference": True}, {"reference": False}]
    before = [torch.cat(trainer.logprobs(own, **side)) for side in sides]
    trainer.train([own], Weighted(), first_step=0)
    return [
        torch.equal(torch.cat(trainer.logprobs(own, **side)), then) for side, then in zip(sides, before, strict=True)
    ]


def changed_by_no_step(trainer: Any, own: list[Microbatch]) -> list[str]:
    """The names of what a step that is skipped changes, and one whose gradient is not finite."""
    before = {name: value.clone() for name, value in trainer.model.parameters.items()}
    trainer.train([own], Weighted(), first_step=0)
    skipped = [name for name, value in before.items() if not torch.equal(value, trainer.model.parameters[name])]
    with pytest.raises(RlframeError, match="the gradient norm must be finite"):
        trainer.train([[replace(each, weights=each.weights / 0) for each in own]], Weighted(), first_step=1)
    return skipped + [name for name, value in before.items() if not torch.equal(value, trainer.model.parameters[name])]


def norms_of_skipped_steps(trainer: Any) -> list[float]:
    """The gradient norm of three micro-batches, which two stages take as four, and of these and an empty one."""
    three = everything()[:3]
    steps = [[three], [[*three, three[0].emptied()]]]
    return [trainer.train(step, Weighted(), first_step=0)[0].metrics["train/grad_norm"].value for step in steps]


def bytes_of_gradients(trainer: Any) -> int:
    """Bytes of gradients that the optimizer holds outside of Megatron's buffers."""
    from rlframe.megatron.worker.offload import gradient_storages, parameters_of, parts  # noqa: PLC0415 - see start

    buffered = {storage.data_ptr() for storage in gradient_storages(trainer.model)}
    gradients = [each.grad for part in parts(trainer.optimizer) for each in parameters_of(part)]
    storages = [gradient.untyped_storage() for gradient in gradients if gradient is not None]
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in buffered)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """The reference model, and what both ranks found."""
    folder, with_biases = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("with_biases")
    model = make("qwen3_moe", folder)
    make("glm4_moe", with_biases)
    return model, run_distributed(on_rank, 2, str(folder), str(with_biases))


def weights(measured: tuple[Any, list[dict[str, Any]]], case: str) -> dict[str, Tensor]:
    """Whole tensors after two optimizer steps, by Hugging Face name."""
    model, ranks = measured
    shapes = {name: part.shape for key, value in model.named_parameters() for name, part in on_disk(key, value).items()}
    return assemble([rank[case] for rank in ranks], "weights", shapes)


@pytest.mark.parametrize("case", SAME_BITS)
def test_an_option_of_how_changes_no_bit(measured: tuple[Any, list[dict[str, Any]]], case: str) -> None:
    plain, other = weights(measured, "plain"), weights(measured, case)
    assert [name for name in plain if not torch.equal(plain[name], other[name])] == []
    for plain_step, other_step in zip(measured[1][0]["plain"]["metrics"], measured[1][0][case]["metrics"], strict=True):
        assert other_step == pytest.approx(plain_step, rel=1e-6)


@pytest.mark.parametrize("case", SAME_NUMBERS)
def test_an_option_of_how_changes_nothing_but_rounding(measured: tuple[Any, list[dict[str, Any]]], case: str) -> None:
    for plain, other in zip(measured[1][0]["plain"]["metrics"], measured[1][0][case]["metrics"], strict=True):
        for key in plain:
            assert other[key] == pytest.approx(plain[key], rel=1e-4), key


def test_tokens_over_capacity_are_dropped(measured: tuple[Any, list[dict[str, Any]]]) -> None:
    load = measured[1][0]["narrow"]["metrics"][0]
    # Each expert has room for half the mean of the router's choices, so the busiest keeps less above the mean.
    assert load["moe/load_peak_worst_layer"] < measured[1][0]["plain"]["metrics"][0]["moe/load_peak_worst_layer"]


def test_a_frozen_router_stays_and_everything_else_moves(measured: tuple[Any, list[dict[str, Any]]]) -> None:
    model, _ = measured
    loaded = {name: part for key, value in model.named_parameters() for name, part in on_disk(key, value).items()}
    trained = weights(measured, "frozen")
    still = {name for name in loaded if torch.equal(loaded[name], trained[name])}
    assert still == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}


def test_a_sleep_gives_gradients_and_moments_back_and_leaves_parameters(
    measured: tuple[Any, list[dict[str, Any]]],
) -> None:
    for rank in measured[1]:
        slept = rank["sleep"]["slept"]
        # Float32: the main weights are the parameters, so two moments of 4 bytes an element move.
        assert slept["moved"].kept_bytes == slept["woken"].kept_bytes == 2 * 4 * slept["elements"] > 0
        assert slept["moved"].dropped_bytes == 4 * slept["gradient_elements"] > 0
        assert slept["left"] == slept["placeholders"] == 0 and slept["same"] and slept["places"]


def reference(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients by Hugging Face name of the whole loss, and [layers, experts] tokens, from transformers."""
    model.zero_grad()
    inputs: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda gate, given, result, index=index: inputs[index].append(given[0].reshape(-1, given[0].shape[-1]))
        )
        for index, layer in enumerate(model.model.layers)
    ]
    every = everything()
    total = sum(each.batch.num_tokens for each in every)
    loss, counts = torch.zeros(()), torch.zeros(LAYERS, EXPERTS)
    for each in every:
        for seen in inputs:
            seen.clear()
        logprobs = []
        for row in each.batch.token_ids.split(each.batch.lengths.tolist()):
            table = torch.log_softmax(model(row[None]).logits[0], -1)
            logprobs.append(torch.cat([torch.zeros(1), table[:-1].gather(1, row[1:, None])[:, 0]]))
        loss = loss - (each.weights * torch.cat(logprobs)).sum()
        for index, layer in enumerate(model.model.layers):
            scores = torch.cat(inputs[index]) @ layer.mlp.gate.weight.T
            tokens = torch.zeros(EXPERTS).scatter_add(
                0, scores.topk(TOPK).indices.flatten(), torch.ones(len(scores) * TOPK)
            )
            counts[index] += tokens
            # E * sum over experts of (share of the choices) * (mean probability); mean of squared log-normalizers.
            share, mean = tokens / (TOPK * len(scores)), scores.softmax(-1).mean(0)
            balancing = EXPERTS * (share * mean).sum()
            z_loss = scores.logsumexp(-1).square().mean()
            loss = loss + len(scores) / total * (AUX * balancing + Z * z_loss)
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients |= on_disk(name, parameter.grad)
    return gradients, counts


@pytest.mark.parametrize("layout", ["d2e2", "d1t2"])
def test_balancing_losses_weigh_what_they_say_and_counts_are_those_of_transformers(
    measured: tuple[Any, list[dict[str, Any]]], layout: str
) -> None:
    model, ranks = measured
    gradients, counts = reference(model)
    shapes = {name: value.shape for name, value in gradients.items()}
    ours = assemble([rank[layout] for rank in ranks], "gradients", shapes)
    for name, value in gradients.items():
        torch.testing.assert_close(
            ours[name], value, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    peaks, idle = counts.amax(1) / counts.mean(1), (counts == 0).float().mean(1)
    for rank in ranks:
        load = rank[layout]["load"]
        assert load["moe/load_peak"] == pytest.approx(float(peaks.mean()))
        assert load["moe/load_peak_worst_layer"] == pytest.approx(float(peaks.max()))
        assert load["moe/idle_experts"] == pytest.approx(float(idle.mean()))
        assert load["moe/load_peak_layer_01"] == pytest.approx(float(peaks[1]))


def test_balancing_losses_count_the_micro_batches_that_fill_a_schedule(
    measured: tuple[Any, list[dict[str, Any]]],
) -> None:
    for rank in measured[1]:
        filled, given = rank["filling"]
        assert filled == given


def test_a_routing_bias_rises_where_an_expert_has_too_few_tokens_and_falls_where_it_has_too_many(
    measured: tuple[Any, list[dict[str, Any]]],
) -> None:
    for rank in measured[1]:
        assert rank["biases"]
        for before, after, tokens in rank["biases"]:
            # DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
            step = RATE * torch.sign(tokens.double().mean() - tokens.double())
            assert step.any()
            torch.testing.assert_close(after, before + step.float(), atol=1e-7, rtol=0)


def test_the_reference_keeps_the_routing_bias_that_it_began_with(
    measured: tuple[Any, list[dict[str, Any]]],
) -> None:
    assert [rank["reference"] for rank in measured[1]] == [[True, False]] * 2


def test_a_step_that_is_not_taken_moves_no_routing_bias(measured: tuple[Any, list[dict[str, Any]]]) -> None:
    assert [rank["skipping"] for rank in measured[1]] == [[], []]


def test_no_gradient_stays_beside_the_buffers(measured: tuple[Any, list[dict[str, Any]]]) -> None:
    assert [rank["gradients of main weights"] for rank in measured[1]] == [0, 0]
