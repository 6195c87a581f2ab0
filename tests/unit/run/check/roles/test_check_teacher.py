"""A teacher that is missing, of no use, misplaced or of another vocabulary is refused before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlframe.models.hub import EMBEDDED, load_family, read_config
from rlframe.run.check import check
from rlframe.run.check.roles import teacher as check_teacher
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError
from rlframe.utils.registry import find

TEACHER = "teacher.path=qwen3_moe_tiny"
ENGINE = [TEACHER, "teacher.placement=engine", "teacher.engine.name=transformers"]
DENSE = {"model_type": "qwen3", "num_hidden_layers": 3}


def faults(*overrides: str) -> list[str]:
    """Those of the teacher alone."""
    run = load("gkd_qwen3_moe_tiny", list(overrides))
    component, _ = find("rlframe.algorithms", run.algorithm.name, key="algorithm.name")
    return list(map(str, check_teacher.faults(run, component(run.algorithm))))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the embedded model's config and tokenizer, to be changed."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "qwen3_moe_tiny" / name, tmp_path / name)
    return tmp_path


def complete(folder: Path) -> Path:
    """The folder, with weights as its config.json calls for."""
    family = load_family(folder)
    shapes = family.tensors(family.architecture(read_config(folder)))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def changed(file: Path, **values: object) -> None:
    """Sets top-level keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    "overrides",
    [
        [TEACHER],
        [TEACHER, "algorithm.on_policy_fraction=0"],
        [TEACHER, "algorithm=on_policy_distillation"],
        [TEACHER, "algorithm=on_policy_distillation", "teacher.placement=own", "teacher.parallel=t2"],
        [TEACHER, "algorithm=grpo", "algorithm.distillation_coefficient=0.1"],
        # Its own ranks may be a pipeline.
        [TEACHER, "algorithm=on_policy_distillation", "teacher.placement=own", "teacher.parallel=p2"],
        [TEACHER, "algorithm.top_k=8"],
        [TEACHER, "algorithm.top_k=8", "algorithm.temperature=0.9", "teacher.placement=own", "teacher.parallel=t2"],
        [*ENGINE, "algorithm.top_k=8"],
        # No engine samples there, so that what one may sample does not count.
        [*ENGINE, "algorithm.top_k=8", "algorithm.on_policy_fraction=0", "data.max_prompt_tokens=2040"],
        [*ENGINE, "algorithm=on_policy_distillation", "teacher.engine.num_engines=2"],
        [TEACHER, "algorithm.seq_kd=true", "teacher.engine.name=transformers", "teacher.engine.max_restarts=0"],
        ["algorithm=grpo"],
    ],
)
def test_a_teacher_that_fits_has_no_fault(overrides: list[str]) -> None:
    assert faults(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([], ["teacher.path must name a model", "algorithm.name=gkd learns from a teacher", "got nothing"]),
        (["algorithm=grpo", TEACHER], ["teacher.path has no effect with algorithm.name=grpo", "distillation_coeff"]),
        (["algorithm=sft", TEACHER], ["teacher.path has no effect with algorithm.name=sft", "remove it"]),
        ([TEACHER, "teacher.placement=own"], ["teacher.placement must be workers", "algorithm.top_k=0, got own"]),
        (ENGINE, ["teacher.placement must be workers", "algorithm.top_k=0, got engine", "set algorithm.top_k"]),
        ([TEACHER, "algorithm.top_k=261"], ["algorithm.top_k must be below the 261 logits", "got 261"]),
        (
            [*ENGINE, "algorithm.top_k=8", "algorithm.temperature=0.9"],
            ["algorithm.temperature must be 1 with teacher.placement=engine, got 0.9"],
        ),
        (
            [*ENGINE, "algorithm=on_policy_distillation", "rollout.temperature=0.9"],
            ["rollout.temperature must be 1 with teacher.placement=engine, got 0.9"],
        ),
        (
            [*ENGINE, "algorithm.top_k=8", "teacher.engine.temperature=0.5"],
            ["teacher.engine.temperature has no effect, got 0.5", "rollout.temperature also applies"],
        ),
        (
            [*ENGINE, "algorithm.top_k=8", "teacher.engine.stop=[x]"],
            ["teacher.engine.stop has no effect, got ['x']"],
        ),
        (
            [*ENGINE, "algorithm.top_k=8", "teacher.engine.max_restarts=1"],
            ["teacher.engine.max_restarts has no effect unless the teacher writes responses"],
        ),
        (
            [TEACHER, "teacher.engine.name=transformers"],
            ["teacher.engine has no effect with teacher.placement=workers", "algorithm.seq_kd"],
        ),
        ([TEACHER, "algorithm.seq_kd=true"], ["teacher.engine must name an engine with algorithm.seq_kd=true"]),
        (
            [*ENGINE, "algorithm.top_k=8", "data.max_prompt_tokens=2040"],
            ["must be at most 2047 (the teacher's positions less 1), got 2048 tokens"],
        ),
        ([TEACHER, "train.parallel=p2"], ["train.parallel=p2 has pipeline stages", "teacher.placement=workers"]),
        (
            [TEACHER, "algorithm=on_policy_distillation", "teacher.placement=own", "teacher.parallel=t4"],
            ["teacher.parallel: tp 4 must divide num_kv_heads 2", "of the teacher qwen3_moe_tiny"],
        ),
        (
            [
                TEACHER,
                "algorithm=on_policy_distillation",
                "train.parallel=d1t2e2",
                "train.moe.dispatcher=allgather",
                "teacher.placement=own",
                "teacher.parallel=d2e2",
            ],
            ["train.moe.dispatcher=allgather needs ranks with equally many tokens", "in teacher.parallel=d2e2"],
        ),
        (["teacher.path=nowhere"], ["teacher.path 'nowhere': no folder"]),
    ],
)
def test_a_fault_names_its_key(overrides: list[str], parts: list[str]) -> None:
    (fault,) = faults(*overrides)
    assert all(part in fault for part in parts), fault


def test_a_dense_teacher_fits_the_layout_of_a_policy_with_experts(other: Path) -> None:
    changed(other / "config.json", **DENSE)
    assert faults(f"teacher.path={complete(other)}", "train.parallel=d2e2") == []


def test_another_number_of_logits_is_refused_where_distributions_are_compared(other: Path) -> None:
    changed(other / "config.json", vocab_size=264)
    (fault,) = faults(f"teacher.path={complete(other)}")
    assert "with the policy's 261 logits" in fault and "with 264" in fault
    # Sampled tokens' logprobs need the same tokens only.
    assert faults(f"teacher.path={complete(other)}", "algorithm=on_policy_distillation") == []


def test_another_tokenizer_is_refused_with_a_token_that_differs(other: Path) -> None:
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, another = [token for token in sorted(vocabulary) if len(token) == 1][:2]
    vocabulary[one], vocabulary[another] = vocabulary[another], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (fault,) = faults(f"teacher.path={complete(other)}")
    assert f"2 tokens differ, such as {one!r}, which is {vocabulary[another]} here" in fault
    assert f"{vocabulary[one]} there" in fault


def test_a_run_is_checked_for_it() -> None:
    with pytest.raises(ConfigError) as caught:
        check(load("gkd_qwen3_moe_tiny", ["algorithm.nll_coefficient=0.1", "rollout.temperature=0.7", "~reward"]))
    # No reward is no fault.
    assert len(caught.value.faults) == 2
    assert str(caught.value.faults[0]).startswith("teacher.path must name a model")
    assert str(caught.value.faults[1]).startswith("algorithm.nll_coefficient=0.1 needs rollout.temperature=1, got 0.7")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # Without an engine no step can be sampled: it never becomes off-policy in silence.
        (["rollout.num_engines=0"], "rollout.num_engines must be at least 1, got 0"),
        (["teacher.path=''"], "teacher.path must be text of at least one character"),
        ([TEACHER, "teacher.parallel=t2"], "teacher.parallel has no effect with placement=workers"),
        ([TEACHER, "teacher.placement=own", "teacher.parallel=x2"], "teacher.parallel is wrong: 'x2'"),
        (["algorithm.seq_kd=true", "algorithm.on_policy_fraction=1"], "algorithm.seq_kd has no effect"),
        ([TEACHER, "teacher.placement=engine"], "teacher.engine must name an engine with placement=engine"),
        ([*ENGINE, "teacher.parallel=t2"], "teacher.parallel has no effect with placement=engine, where engine.tp"),
        ([*ENGINE, "teacher.engine.name=nowhere"], "teacher.engine.name must be one of"),
    ],
)
def test_a_value_out_of_range_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("gkd_qwen3_moe_tiny", overrides)
    assert any(str(fault).startswith(message) for fault in caught.value.faults), caught.value.faults
