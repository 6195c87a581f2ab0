"""Adapters on every layout equal a plain LoRA on the transformers model, in logprobs, gradients, merged weights and
after a change of layout; and the base is never touched."""

import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Recompute, TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.models import adapters
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed, save
from tests.multiprocess.megatron.test_layouts import LENGTHS, Weighted, assemble, on_disk, sequences, weights_of
from tests.tiny_models import make

SEED = 3
CASES: list[dict[str, Any]] = [
    {"model": "qwen3", "layout": "d1t2", "modules_to_save": ["embed_tokens", "q_norm"], "start_from": True},
    {"model": "qwen3", "layout": "d1t2", "recompute": "full"},
    {
        "model": "qwen2",
        "layout": "d1p2v2",
        "recompute": "full",
        "target_modules": ["q_proj", "v_proj", "linear_fc1", "0.mlp.down_proj", "lm_head"],
        "exclude_modules": ["layers.1.mlp.gate_proj"],
        "rslora": True,
    },
    {"model": "qwen3_moe", "layout": "d1t2", "save": True},
    {"model": "qwen3_moe", "layout": "d2e2", "load": True, "modules_to_save": []},
    {"model": "qwen3_moe", "layout": "d1t2|ffn:d1t2", "modules_to_save": ["mlp.gate"]},
    {"model": "qwen3_moe", "layout": "d2|ffn:d1t2", "load": True},
    {"model": "qwen3_tied", "layout": "d1c2", "new": True},
    {"model": "qwen3_tied", "layout": "d1p2", "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    # Megatron's name, which the last stage's copy of the embedding has not.
    {"model": "qwen3_tied", "layout": "d1p2", "target_modules": ["q_proj"], "modules_to_save": ["word_embeddings"]},
    # No dense parameter is trained, and on the first stage nothing at all.
    {"model": "qwen3_moe", "layout": "d2e2", "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    {"model": "qwen3", "layout": "d1p2", "target_modules": ["lm_head"]},
    {"model": "qwen3_next", "layout": "d1t2", "target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    {"model": "qwen3_moe", "layout": "d1t2", "dropout": 0.25},
    {"model": "qwen3_moe", "layout": "d1t2", "dropout": 0.25, "recompute": "full"},
]
"""Each with two ranks. `load` resumes from what `save` wrote; `new` starts from fresh adapters; `start_from` loads the
base again, from Megatron's form."""
SAVING = next(index for index, case in enumerate(CASES) if case.get("save"))
LORA_FIELDS = ("dropout", "target_modules", "exclude_modules", "modules_to_save", "rslora")


def lora_of(case: dict[str, Any], folder: str | None) -> LoraConfig:
    """The settings of a case; rank and alpha such that B A counts neither 1 nor 2 times."""
    fields = {name: case[name] for name in LORA_FIELDS if name in case}
    return LoraConfig(rank=4, alpha=6.0, path=folder, **fields)


def adapter_of(case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random A and B for the matrices that the case means, and random values for what is trained in full, by PEFT's
    names: chosen here by hand, not by the code under test."""
    generator = torch.Generator().manual_seed(5)
    words = {"linear_fc1": ("gate_proj", "up_proj"), "word_embeddings": ("embed_tokens",)}
    targets = [word for name in case.get("target_modules", ["_proj"]) for word in words.get(name, (name,))]
    trained = [word for name in case.get("modules_to_save", []) for word in words.get(name, (name,))]
    values = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if any(module.endswith(f".{saved}") for saved in trained):
            values[f"base_model.model.{name}"] = tensor + torch.randn(tensor.shape, generator=generator) * 0.05
        elif kind == "weight" and any(module.endswith(word) for word in targets):
            if any(module.endswith(word) for word in case.get("exclude_modules", [])):
                continue
            for half, shape in (("lora_A", (4, tensor.shape[1])), ("lora_B", (tensor.shape[0], 4))):
                values[f"base_model.model.{module}.{half}.weight"] = torch.randn(shape, generator=generator) * 0.1
    return values


def merged(tensors: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], scaling: float) -> dict[str, Any]:
    """W + scaling B A by the checkpoint's names: a plain LoRA, through which autograd finds dA and dB."""
    whole = {}
    for name, tensor in tensors.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            tensor = tensor + scaling * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
        whole[name] = adapter.get(f"base_model.model.{name}", tensor)
    return whole


def logprobs_with(model: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """[T] of the batch, by transformers with `weights` in place of its own."""
    own = {}
    for name, parameter in model.named_parameters():
        pieces = [weights[piece] for piece in on_disk(name, parameter)]
        if name.endswith("experts.gate_up_proj"):
            pieces = [torch.cat(pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
        own[name] = torch.stack(pieces) if "experts." in name else pieces[0]
    rows = []
    for row in sequences().token_ids.split(LENGTHS):
        output = torch.func.functional_call(model, own, (row[None],), tie_weights=True)
        table = torch.log_softmax(output.logits[0].float(), -1)
        rows += [torch.zeros(1), table[:-1].gather(1, row[1:, None])[:, 0]]
    return torch.cat(rows)


def on_rank(rank: int, init_method: str, root: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one rank measured of every case."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    results = []
    for index, case in enumerate(cases):
        folder = pathlib.Path(root)
        train = TrainConfig(
            parallel=case["layout"], dtype="float32", recompute=Recompute(case.get("recompute", "none")),
            optimizer=OptimizerConfig(lr=1e-2, clip_grad=1e9),
            lora=lora_of(case, None if case.get("new") else str(folder / f"adapter{case['index']}")),
        )  # fmt: skip
        setup = TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device,
            model=ModelConfig(path=str(folder / case["model"])), train=train, seed=SEED, temperature=1.0,
            total_optimizer_steps=10, timeout_s=60, with_reference=True,
        )  # fmt: skip
        if case.get("start_from"):
            (folder / "base").mkdir(exist_ok=True)
            whole = replace(setup, train=replace(train, lora=None), init_method=f"{setup.init_method}base")
            save(Trainer(whole), folder / "base")
            parallel.shutdown()
        trainer = Trainer(setup)
        if case.get("start_from"):
            for parameter in (*trainer.model.parameters.values(), *trainer.model.lora.parameters.values()):
                parameter.mul_(0.5)
            trainer.load_weights(folder / "base")
        results.append(measure(trainer, case, folder))
        parallel.shutdown()
    return results


def measure(trainer: Any, case: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """Everything that `check` looks at."""
    from rlframe.megatron.checkpoint import state as checkpoint  # noqa: PLC0415
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank

    batch = sequences()
    ranks, plan = split(batch, weights_of(batch), num_ranks=Parallel.parse(case["layout"]).dp, max_tokens=40)
    mine, lora = ranks[trainer.coordinates.dp_rank].microbatches(), trainer.model.lora
    tensors = list(trainer.layout.tensors)
    base = {name: value.clone() for name, value in trainer.model.parameters.items() if name not in lora.saved}
    measured = {
        "where": trainer.coordinates,
        "plan": plan,
        "merged": trainer.export(tensors, torch.float32),
        "adapter": trainer.export_adapter(list(trainer.adapter_tensors()), torch.float32),
        "shapes": trainer.adapter_tensors(),
        "logprobs": trainer.logprobs(mine, reference=False),
        "reference": trainer.logprobs(mine, reference=True),
        "trained": sorted(value.numel() for value in lora.parameters.values()),
        "buffered": sorted(value.numel() for buffer in buffers(trainer) for value in buffer.params),
        "share": sum(
            value.numel() / buffer.data_parallel_group.size() for buffer in buffers(trainer) for value in buffer.params
        ),
    }
    lora.seed_dropout(seed=SEED, step=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward.accumulate_gradients(trainer.model, mine, Weighted(), temperature=1.0)
    measured["operations"] = {event.key for event in profile.key_averages()}
    measured["gradients"] = gradients(trainer)
    measured["grad_norm"] = trainer.train([mine], Weighted(), first_step=0)[0].metrics["train/grad_norm"].value
    states = [state for part in checkpoint.parts(trainer.optimizer) for state in part.optimizer.state.values()]
    measured["moments"] = sum(state["exp_avg"].numel() for state in states)
    measured["moved"] = [not torch.equal(trainer.weights[name], trainer.merged.base[name]) for name in lora.adapters]
    measured["reference_after"] = trainer.logprobs(mine, reference=True)
    measured["base_kept"] = all(torch.equal(trainer.model.parameters[name], value) for name, value in base.items())
    measured["trained_export"] = trainer.export(tensors, torch.float32)
    measured["trained_adapter"] = trainer.export_adapter(list(trainer.adapter_tensors()), torch.float32)
    if case.get("save"):
        bound = checkpoint.state_bytes(trainer.model, trainer.optimizer, follows=False)
        trainer.stage(folder, copy=False)
        assert bound >= sum(value.nbytes for _, value in trainer.staged.items if isinstance(value, torch.Tensor)) > 0
        (folder / "training").mkdir(exist_ok=True)
        save(trainer, folder / "training")
    if case.get("load"):
        trainer.load(folder / "training", num_optimizer_steps=1)
        measured["loaded"] = trainer.export_adapter(list(trainer.adapter_tensors()), torch.float32)
        measured["loaded_export"] = trainer.export(tensors, torch.float32)
    if case.get("save") or case.get("load"):
        trainer.train([mine], Weighted(), first_step=1)
        measured["second"] = trainer.export_adapter(list(trainer.adapter_tensors()), torch.float32)
    return measured


def goes_on(rank: int, init_method: str, model: str, state: str, layouts: list[str]) -> list[dict[str, Any]]:
    """The adapters of this rank's layers where a state was saved, and where it was loaded, before and after a step."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    seen, folder = [], pathlib.Path(state)
    for index, layout in enumerate(layouts):
        lora = LoraConfig(rank=4, target_modules=["layers.1.self_attn.o_proj"])
        train = TrainConfig(parallel=layout, dtype="float32", optimizer=OptimizerConfig(lr=1e-2), lora=lora)
        trainer = Trainer(TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device, model=ModelConfig(path=model), train=train,
            seed=SEED, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=True,
        ))  # fmt: skip
        batch = sequences()
        shares, _ = split(batch, weights_of(batch), num_ranks=Parallel.parse(layout).dp, max_tokens=40)
        mine = shares[trainer.coordinates.dp_rank].microbatches()
        if index:
            trainer.load(folder, num_optimizer_steps=1)
        else:
            trainer.train([mine], Weighted(), first_step=0)
            save(trainer, folder)
        now = trainer.export_adapter(list(trainer.adapter_tensors()), torch.float32)
        trainer.train([mine], Weighted(), first_step=1)
        later = trainer.export_adapter(list(trainer.adapter_tensors()), torch.float32)
        seen.append({"now": now, "later": later, "shapes": trainer.adapter_tensors()})
        parallel.shutdown()
    return seen


def test_a_state_goes_on_where_a_stage_trains_nothing(tmp_path: pathlib.Path) -> None:
    make("qwen3", tmp_path / "qwen3")
    (tmp_path / "state").mkdir()
    layouts = ["d1p2", "d1p2", "d2"]
    ranks = run_distributed(goes_on, 2, str(tmp_path / "qwen3"), str(tmp_path / "state"), layouts)
    saved, *others = (list(each) for each in zip(*ranks, strict=True))
    shapes = {name: torch.Size(shape) for rank in saved for name, shape in rank["shapes"].items()}
    assert len(shapes) == 2 and not saved[0]["shapes"], "the first stage trains nothing"
    for results in others:
        for key in ("now", "later"):
            found, expected = (assemble(each, key, shapes) for each in (results, saved))
            torch.testing.assert_close(found, expected, atol=2e-4 if key == "later" else 0, rtol=0)


def buffers(trainer: Any) -> list[Any]:
    """Megatron's flat buffers of parameters and gradients, one optimizer slot per element."""
    return [each for chunk in trainer.model.chunks for each in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def gradients(trainer: Any) -> dict[str, list]:
    """This rank's pieces of the gradients by PEFT's names, gathered over the data-parallel ranks that share them."""
    for buffer in buffers(trainer):
        group = buffer.data_parallel_group
        if group.size() > 1:
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                torch.distributed.all_gather(shards, shards[group.rank()].clone(), group=group)
    lora = trainer.model.lora
    grads = {name: parameter.main_grad for name, parameter in lora.trained.items()}
    return {
        name: [(tuple(box.region), box.view(grads).clone()) for box in boxes]
        for name, boxes in lora.layout.boxes.items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("lora")


def test_adapters_on_every_layout_equal_a_plain_lora_and_leave_the_base_alone(root: pathlib.Path) -> None:
    deep = {"qwen2": {"num_hidden_layers": 4}}
    models = {name: make(name, root / name, **deep.get(name, {})) for name in {case["model"] for case in CASES}}
    disks = {name: load_file(root / name / "model.safetensors") for name in models}
    for index, case in enumerate(CASES):
        case["index"] = index
        settings = lora_of(case, None)
        adapters.write(
            root / f"adapter{index}", adapter_of(case, disks[case["model"]]).items(), base=case["model"],
            model_tensors=disks[case["model"]], rank=4, alpha=6.0, rslora=settings.rslora, dropout=0.0,
        )  # fmt: skip
    ranks = run_distributed(on_rank, 2, str(root), CASES)
    measured = [[results[index] for results in ranks] for index in range(len(CASES))]
    for case, results in zip(CASES, measured, strict=True):
        check(case, models[case["model"]], disks[case["model"]], results)
    check_resumed(measured)
    dropped = [results for case, results in zip(CASES, measured, strict=True) if case.get("dropout")]
    check_dropout(*dropped, without=measured[SAVING])
    check_transformers_loads_the_merged_export(root, measured[SAVING])


def check(case: dict[str, Any], model: Any, disk: dict[str, torch.Tensor], results: list[dict[str, Any]]) -> None:
    """One case against the plain LoRA."""
    tell = f"{case['model']} at {case['layout']}"
    adapter = {name: value.requires_grad_() for name, value in expected_adapter(case, disk).items()}
    whole = merged(disk, adapter, 6.0 / (2.0 if case.get("rslora") else 4.0))
    logprobs = logprobs_with(model, whole)
    (-(weights_of(sequences()) * logprobs).sum()).backward()
    base = logprobs_with(model, disk).detach()
    # Those of tokens outside of the loss are not computed.
    mask = sequences().loss_mask
    for name, wanted in (("logprobs", logprobs.detach() * mask), ("reference", base * mask)):
        torch.testing.assert_close(joined(results, name), wanted, atol=1e-4, rtol=0, msg=lambda t: f"{tell}: {t}")
    assert case.get("new") or (logprobs.detach() - base).abs().max() > 0.05, f"{tell}: the adapter does nothing"
    for result in results:
        assert result["base_kept"] and all(result["moved"]), tell
        assert all(map(torch.equal, result["reference"], result["reference_after"])), tell
        assert result["buffered"] == result["trained"], f"{tell}: gradients for more than the adapters"
        # A gated delta net multiplies batches itself; so do adapters of a layer whose input came from another stage.
        if case["model"] != "qwen3_next" and case["layout"] != "d1p2v2":
            assert "aten::bmm" not in result["operations"], f"{tell}: the head's weight is read once for each token"
    assert sum(r["moments"] for r in results) == sum(r["share"] for r in results), f"{tell}: the optimizer's state"

    shapes = {name: value.shape for name, value in adapter.items()}
    assert {name: tuple(shape) for result in results for name, shape in result["shapes"].items()} == {
        name: tuple(shape) for name, shape in shapes.items()
    }, tell
    for name, value in assemble(results, "adapter", shapes).items():
        assert torch.equal(value, adapter[name].detach()), f"{tell}: {name}"
    for name, value in assemble(results, "merged", {name: value.shape for name, value in disk.items()}).items():
        torch.testing.assert_close(value, whole[name].detach(), atol=1e-6, rtol=0, msg=lambda t: f"{tell}: {t}")  # noqa: B023
    if not case.get("dropout"):
        check_gradients(tell, adapter, assemble(results, "gradients", shapes), results)


def check_gradients(tell: str, adapter: dict[str, Any], summed: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Each gradient, and their norm, which is one over all ranks."""
    for name, value in adapter.items():
        torch.testing.assert_close(
            summed[name], value.grad, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{tell}, {name}: {text}"
        )
    norm = torch.stack([value.grad.square().sum() for value in adapter.values()]).sum().sqrt()
    for result in results:
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-4), f"{tell}: {result['where']}"


def expected_adapter(case: dict[str, Any], disk: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the ranks must hold at first."""
    given = adapter_of(case, disk)
    if not case.get("new"):
        return given
    return {name: adapters.initial(name, tuple(value.shape), seed=SEED) for name, value in given.items()}


def joined(results: list[dict[str, Any]], key: str) -> torch.Tensor:
    """[T] from the ranks that report."""
    reporting = sorted((r for r in results if r["where"].reports), key=lambda r: r["where"].dp_rank)
    return join([r[key] for r in reporting], reporting[0]["plan"], torch.tensor(LENGTHS))


def check_resumed(measured: list[list[dict[str, Any]]]) -> None:
    """Adapters and moments saved at one layout go on at others as at the first."""
    saved = measured[SAVING]
    shapes = {name: torch.Size(shape) for result in saved for name, shape in result["shapes"].items()}
    first, second = (assemble(saved, key, shapes) for key in ("trained_adapter", "second"))
    for case, results in zip(CASES, measured, strict=True):
        if case.get("load"):
            loaded, resumed = (assemble(results, key, shapes) for key in ("loaded", "second"))
            for name in shapes:
                assert torch.equal(loaded[name], first[name]), f"{case['layout']}: {name}"
                # Adam's second step divides by moments that float32 sums in another order.
                torch.testing.assert_close(resumed[name], second[name], atol=2e-4, rtol=0)
    moved = max(float((second[name] - first[name]).abs().max()) for name in shapes)
    assert moved > 5e-3, "the second step does nothing"


def check_dropout(
    kept: list[dict[str, Any]], recomputed: list[dict[str, Any]], *, without: list[dict[str, Any]]
) -> None:
    """Dropout changes the gradients, and draws the same when a step's activations are computed again or the step is
    taken again: `accumulate_gradients` and `train` of `measure` were both step 0."""
    shapes = {name: torch.Size(shape) for result in kept for name, shape in result["shapes"].items()}
    gradients, again = (assemble(results, "gradients", shapes) for results in (kept, recomputed))
    for name, value in gradients.items():
        torch.testing.assert_close(again[name], value, atol=2e-5, rtol=1e-3, msg=lambda t, name=name: f"{name}: {t}")
    norm = float(torch.stack([value.square().sum() for value in gradients.values()]).sum().sqrt())
    assert all(result["grad_norm"] == pytest.approx(norm, rel=1e-4) for result in (*kept, *recomputed))
    assert norm != pytest.approx(without[0]["grad_norm"], rel=1e-3), "nothing was dropped"


def check_transformers_loads_the_merged_export(root: pathlib.Path, results: list[dict[str, Any]]) -> None:
    """The trained model as transformers reads it: its logprobs are those of the base with the trained adapter."""
    import transformers  # noqa: PLC0415

    case, folder = CASES[SAVING], root / "export"
    disk = load_file(root / case["model"] / "model.safetensors")
    exported = assemble(results, "trained_export", {name: value.shape for name, value in disk.items()})
    write_checkpoint(folder, exported.items())
    copy_sidecars(root / case["model"], folder, dtype=torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shapes = {name: torch.Size(shape) for result in results for name, shape in result["shapes"].items()}
    trained = merged(disk, assemble(results, "trained_adapter", shapes), 6.0 / 4.0)
    weights = {key: value for name, own in loaded.named_parameters() for key, value in on_disk(name, own).items()}
    with torch.no_grad():
        torch.testing.assert_close(logprobs_with(loaded, weights), logprobs_with(loaded, trained), atol=1e-4, rtol=0)
