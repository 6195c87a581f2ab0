"""Rules that span components: each fault once, with its key, and all of them together."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlframe.config.load import composed
from rlframe.models.hub import EMBEDDED
from rlframe.run.check import check, checked
from rlframe.run.evaluation import caution
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
ONE_UPDATE = "train.num_minibatches * train.epochs_per_batch = 1"
DUEL = "reward.parts.duel={name: judge, per: group, options: {endpoint: {base_url: 'http://127.0.0.1:9/v1', model: m}}}"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_in(tmp_path)


def model_in(folder: Path) -> str:
    """Makes the folder that of a model without weights."""
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    copy_tokenizer(folder)
    return str(folder)


def copy_tokenizer(folder: Path) -> None:
    """Puts the embedded model's tokenizer into the folder."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / "qwen3_moe_tiny" / name, folder / name)


def h200(_: int) -> SimpleNamespace:
    """What torch tells of a device."""
    return SimpleNamespace(name="NVIDIA H200", total_memory=150_000_000_000)


def faults(model: str, *overrides: str, config: str = "grpo_qwen3_moe") -> list[str]:
    small = ["data.max_prompt_tokens=64", "rollout.max_tokens=64"] if config.startswith("grpo") else []
    try:
        check(load(config, [f"model.path={model}", "model.random_init=true", *small, *overrides]))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


def test_the_main_job_has_no_fault(model: str) -> None:
    assert faults(model) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.dual_clip=3", "train.epochs_per_batch=2"],
        ["algorithm.dual_clip=3", "algorithm.correction.bypass=true"],
        ["algorithm.ratio_cap=1.1", "train.epochs_per_batch=2"],
        ["algorithm.correction.masks=[{of: token, low: 0.5, high: 2}, {of: seq_max_k3, high: 1}]"],
        ["algorithm.correction.bypass=true", "algorithm.correction.masks=[{of: seq_geo, high: 1.01}]"],
        ["algorithm=kl_cov", "train.epochs_per_batch=2"],
        ["algorithm=gspo", "algorithm.normalize_by=batch_std"],
        ["algorithm=dapo", "algorithm.dynamic_sampling.reward_part=exact_match"],
        ["algorithm.correction.weight=token", "algorithm.correction.weight_cap=2"],
        ["algorithm.kl_coefficient=0.1", "algorithm.adaptive_kl.target_nats=0.01"],
    ],
    ids=" ".join,
)
def test_options_of_the_algorithm_have_no_fault(model: str, overrides: list[str]) -> None:
    assert faults(model, *overrides) == []


def test_adapters_on_every_matrix_have_no_fault(model: str) -> None:
    assert faults(model, "train.lora.rank=4") == []


def test_the_supervised_job_has_no_fault(model: str) -> None:
    assert faults(model, config="sft_qwen3_moe_tiny") == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["prompts_per_step=10", "train.num_minibatches=4"],
            ["multiple of train.num_minibatches=4", "got 10", "8 or 12 fits"],
        ),
        # 2 prompts * 2 rollouts / 2 minibatches = 2 sequences for 4 ranks; ceil(4 / 2) * 2 = 4 prompts give 4.
        (
            ["prompts_per_step=2", "algorithm.group_size=2", "train.num_minibatches=2", "train.parallel=d4"],
            ["2 sequences", "the 4 data-parallel ranks", "prompts_per_step=4 fits"],
        ),
        (["environment.name=nonsense"], ["environment.name must be one of ", ", single_turn, tools", "got 'nonsense'"]),
        (["train.parallel=d1t4"], ["train.parallel: tp 4 must divide num_kv_heads 2"]),
        (["train.parallel=d3e3"], ["train.parallel: ep 3 must divide num_experts 8"]),
        (["train.parallel={pp:2,vpp:3}"], ["train.parallel: vpp 3 must divide the ", "layers of stage 0 (pp 2, "]),
        (["train.parallel={tp:4,cp:2}"], ["train.parallel: tp 4 must divide num_kv_heads 2"]),
        (
            ["train.parallel=c2", "train.max_tokens_per_microbatch=60"],
            ["at most train.max_tokens_per_microbatch * 2 context-parallel ranks (120)", "128 tokens"],
        ),
        (["rollout.max_tokens=500"], ["data.max_prompt_tokens=64 + rollout.max_tokens=500", "(512)", "564"]),
        (["evaluation.max_tokens=500"], ["data.max_prompt_tokens=64 + evaluation.max_tokens=500", "(512)"]),
        (["train.max_tokens_per_microbatch=100"], ["train.max_tokens_per_microbatch (100)", "128 tokens"]),
        (["data.path=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["reward.parts.mine.name=nowhere.py:judge"], ["reward.parts.mine", "nowhere.py"]),
        (["reward.parts.mine.name=exact_mtach"], ["reward.parts.mine.name must be one of", "exact_mtach"]),
        (["reward.parts.exact_match.options.ignore_cas=true"], ["reward.parts.exact_match.options.ignore_cas"]),
        (["logging.wandb_project=p"], ["logging.wandb_project needs the package wandb"]),
        (
            ["train.optimizer.min_lr=1e-5", "train.optimizer.schedule=constant"],
            ["train.optimizer.min_lr has no effect with schedule=constant"],
        ),
        (["data.evaluation_count=0", "evaluation.every_steps=5"], ["evaluation.every_steps has no effect"]),
        (["cluster.device=cuda"], ["cluster.device must be cpu or auto"]),
        (["train.lora.target_modules=[q_porj]"], ["train.lora.target_modules: 'q_porj'", "no module has this name"]),
        (["train.lora.path=nowhere"], ["train.lora.path", "nowhere", "not an adapter in PEFT format"]),
        (
            ["weight_sync.transport=cuda_ipc"],
            [
                "weight_sync.transport=cuda_ipc does not work with cluster.device=cpu on this machine: ",
                "auto chooses one that works",
            ],
        ),
        (
            ["rollout=vllm", "rollout.max_model_len=100"],
            ["data.max_prompt_tokens=64 + rollout.max_tokens=64", "rollout.max_model_len (100)", "128 tokens"],
        ),
        (
            ["algorithm.dual_clip=3"],
            ["algorithm.dual_clip has no effect with train.num_minibatches * train.epochs_per_batch = 1"],
        ),
        (
            ["algorithm=gspo", "algorithm.dual_clip=3"],
            ["algorithm.dual_clip has no effect with train.num_minibatches * train.epochs_per_batch = 1"],
        ),
        (
            ["algorithm.ratio_cap=3"],
            ["algorithm.ratio_cap has no effect with train.num_minibatches * train.epochs_per_batch = 1"],
        ),
        (["algorithm=dppo", "algorithm.ratio_cap=3"], [f"algorithm.ratio_cap has no effect with {ONE_UPDATE}"]),
        (
            ["algorithm=kl_cov"],
            ["algorithm.name=kl_cov has no effect with train.num_minibatches * train.epochs_per_batch = 1"],
        ),
        (
            ["algorithm.correction.weight=token", "algorithm.correction.normalize_weights=true"],
            [
                "algorithm.correction.normalize_weights must be false",
                f"{ONE_UPDATE}, got true",
            ],
        ),
        (
            ["algorithm=dapo", "algorithm.dynamic_sampling.reward_part=math"],
            ["algorithm.dynamic_sampling.reward_part must be one of reward.parts, exact_match, got 'math'"],
        ),
        (["rollout=vllm", "rollout.max_model_len=4096"], ["rollout.max_model_len=4096", "512"]),
    ],
)
def test_a_fault_names_key_rule_and_value(
    model: str, overrides: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.run.check.machines.devices.missing", lambda package: package == "wandb")
    found = faults(model, *overrides)
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found[0]


def test_an_engine_that_is_not_installed_is_named_with_its_extra(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.run.check.machines.devices.missing", lambda package: package == "vllm")
    assert faults(model, "rollout=vllm") == ['rollout.name=vllm needs the package vllm: pip install "rlframe[vllm]"']


def test_an_engine_that_cannot_split_the_model_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.run.check.machines.devices.missing", lambda package: False)
    assert faults(model, "rollout=vllm", "rollout.tp=2") == []
    found = faults(model, "rollout=vllm", "rollout.tp=3")
    assert any("tp 3 must divide num_attention_heads 4" in fault for fault in found), found


def test_an_engine_that_cannot_keep_its_cache_is_not_told_to(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ["cluster.colocate=false", "loop.max_policy_lag=1", "rollout.cache_after_sync=keep"]
    assert faults(model, *keep) == []
    # As of an engine from outside that says nothing.
    monkeypatch.setattr("rlframe.rollout.transformers.engine.TransformersConfig.keeps_cache", False)
    assert faults(model, *keep) == [
        "rollout.cache_after_sync must be recompute with rollout.name=transformers, which cannot keep the keys and "
        "values of running requests over a sync, got keep"
    ]
    assert faults(model) == []


def test_engines_of_several_devices_are_counted_with_them(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_properties", h200)
    monkeypatch.setattr("rlframe.run.check.machines.devices.missing", lambda package: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wide = ["cluster.device=cuda", "rollout=vllm", "rollout.tp=2"]
    assert faults(model, *wide, "rollout.num_engines=2") == []
    (fault,) = faults(model, *wide, "rollout.num_engines=2", "cluster.colocate=false")
    assert (
        "rollout.num_engines (2 of 2 devices) with cluster.colocate=false need 6 CUDA devices" in fault
        and "has 4" in fault
    )
    (fault,) = faults(model, *wide, "rollout.num_engines=2", "weight_sync.transport=shm")
    assert fault.startswith("weight_sync.transport=shm does not work with cluster.device=cuda on this machine: ")


def test_a_critic_has_no_fault(model: str) -> None:
    own = ["critic.train.parallel=d1", "critic.train.optimizer.lr=1e-5", "critic.colocate=false"]
    assert faults(model, "algorithm=ppo") == faults(model, "algorithm=ppo", *own) == []
    sleeping = ["train.offload_optimizer=true", "cluster.colocate=false"]
    assert faults(model, "algorithm=ppo", *sleeping) == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["critic.train.parallel=d3e3"], ["critic.train.parallel: ep 3 must divide num_experts 8"]),
        (["critic.train.num_minibatches=3"], ["prompts_per_step must be a multiple of critic.train.num_minibatches=3"]),
        (["critic.train.max_tokens_per_microbatch=100"], ["at most critic.train.max_tokens_per_microbatch (100)"]),
        (["critic.train.optimizer.min_lr=1e-5", "critic.train.optimizer.schedule=constant"],
         ["critic.train.optimizer.min_lr has no effect with schedule=constant"]),
        (["critic.model.path=nowhere"], ["critic.model.path 'nowhere'"]),
        (["critic.model.path=qwen3_moe_tiny"], ["critic.model.path=qwen3_moe_tiny must have the vocabulary of"]),
        (["algorithm.critic_warmup_steps=3", "steps=3"], ["algorithm.critic_warmup_steps must be below steps=3"]),
        # The policy trains in the last two steps, and the reference would move after the second.
        (["steps=4", "algorithm.critic_warmup_steps=2", "algorithm.kl_in_reward=false", "algorithm.kl_coefficient=0.1",
          "algorithm.reference_update.every_steps=2"],
         ["reference_update.every_steps must be below steps=4 less algorithm.critic_warmup_steps=2, got 2"]),
        (["critic.train.offload_optimizer=true", "critic.colocate=false"],
         ["critic.train.offload_optimizer has no effect with critic.colocate=false"]),
        (["train.offload_optimizer=true", "cluster.colocate=false", "critic.colocate=false"],
         ["train.offload_optimizer has no effect with cluster.colocate=false"]),
        (["algorithm=grpo", "critic.colocate=false"], ["critic.colocate has no effect with algorithm.name=grpo"]),
        (["algorithm=grpo", "critic.train.dtype=float32"], ["critic.train has no effect with algorithm.name=grpo"]),
    ],
)  # fmt: skip
def test_a_fault_of_the_critic_names_its_key(model: str, overrides: list[str], parts: list[str]) -> None:
    found = faults(model, "algorithm=ppo", *overrides)
    assert len(found) == 1, found
    assert all(part in found[0] for part in parts), found[0]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    (fault,) = faults(str(tmp_path / "nothing"))
    assert "model.path" in fault and str(tmp_path / "nothing") in fault


def test_an_unknown_family_lists_the_known_ones(model: str) -> None:
    (Path(model) / "config.json").write_text(json.dumps(QWEN3_MOE | {"model_type": "bert"}))
    (fault,) = faults(model)
    assert "'bert'" in fault and "qwen3_moe" in fault


def test_a_malformed_record_is_named_by_file_and_line(model: str, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    (fault,) = faults(model, f"data.path={file}")
    assert f"{file}:2" in fault


def test_settings_that_only_rollouts_use_are_faults_of_a_supervised_run(model: str) -> None:
    found = faults(
        model,
        "train.num_minibatches=2",
        "evaluation.max_tokens=3",
        "reward=exact_match",
        "weight_sync.transport=reload",
        config="sft_qwen3_moe_tiny",
    )
    keys = ["train.num_minibatches", "evaluation.max_tokens", "reward.parts", "weight_sync.transport"]
    assert sorted(fault.split()[0] for fault in found) == sorted(keys)


def test_a_reload_needs_an_engine_with_a_loader(model: str) -> None:
    assert faults(model, "weight_sync.transport=reload") == [
        "weight_sync.transport must not be reload, got reload: rollout.name=transformers has no loader of its own; "
        "auto chooses one that works"
    ]
    # Which engine it is is not known where the rollout cannot be built.
    values = composed("grpo_qwen3_moe", [f"model.path={model}", "rollout=vllm", "rollout.max_tokens=-3"])
    with pytest.raises(ConfigError) as caught:
        checked(values | {"weight_sync": {"transport": "reload"}})
    assert not [fault for fault in caught.value.faults if str(fault.key) == "weight_sync.transport"]


def test_of_a_streamed_dataset_the_beginning_is_looked_at_and_nothing_is_held_out(model: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "q", "response": "r"}\n' * 3 + "no record\n")
    streamed = [f"data.path={file}", "data.streaming=true", "data.shuffle_buffer=3"]
    assert faults(model, *streamed, config="sft_qwen3_moe_tiny") == []
    (fault,) = faults(model, *streamed, "evaluation.every_steps=5", config="sft_qwen3_moe_tiny")
    assert fault.startswith("evaluation.every_steps has no effect with data.streaming=true and no data.evaluation_path")
    (fault,) = faults(model, *streamed[:2], config="sft_qwen3_moe_tiny")
    assert fault.startswith(f"data: {file}:4: expected one JSON object per line")


def test_faults_of_several_components_come_together(tmp_path: Path) -> None:
    found = faults(
        str(tmp_path / "nothing"),
        "train.max_tokens_per_microbatch=1",
        "prompts_per_step=10",
        "train.num_minibatches=4",
        "data.path=nowhere.jsonl",
        "reward.parts.mine.name=nowhere.py:judge",
    )
    assert len(found) == 5


def test_a_section_that_cannot_be_built_does_not_hide_faults_elsewhere(tmp_path: Path) -> None:
    values = {
        "name": "a",
        "output": "b",
        "algorithm": {"name": "grpo", "group_size": 1},
        "train": {"optimzer": {"lr": 1}, "num_minibatches": 7},
        "rollout": {"name": "nothing"},
        "data": {"path": "nowhere.jsonl"},
        "reward": {"parts": {"mine": {"name": "nowhere.py:judge"}}},
        "model": {"path": str(tmp_path / "nothing")},
    }
    with pytest.raises(ConfigError) as caught:
        checked(values)
    starts = [
        "algorithm.group_size must",
        "train.optimzer.lr is not a key",
        "rollout.name must",
        "model.path",
        "data: ",
        "reward.parts.mine",
    ]
    assert len(caught.value.faults) == len(starts)
    assert all(any(str(fault).startswith(start) for fault in caught.value.faults) for start in starts)


def reads_a_switch(folder: Path) -> str:
    """A model whose chat template has a switch, which that of the default model has not."""
    shutil.copytree(EMBEDDED / "qwen3_moe_tiny", folder)
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{% if enable_thinking %}{% endif %}")
    return f"model.path={folder}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["environment.max_turns=abc", "environment.name=gymnasium", "~reward.parts"],
        ["prompts_per_step=abc", "algorithm=ppo", "+critic.train.num_minibatches=3"],
        ["model.random_init=abc", "data.chat_template_kwargs={enable_thinking: false}"],
        ["mode=generat", "train.max_tokens_per_microbatch=16"],
    ],
)
def test_a_default_in_the_place_of_a_wrong_value_is_no_further_fault(tmp_path: Path, overrides: list[str]) -> None:
    values = composed("grpo_qwen3_moe", [reads_a_switch(tmp_path / "model"), *overrides])
    with pytest.raises(ConfigError) as caught:
        checked(values)
    assert [f"{fault.key}" for fault in caught.value.faults] == [overrides[0].partition("=")[0]]


def test_a_users_reward_must_not_need_a_field_that_no_record_has(model: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(response, answer, promt): return 1.0\n")
    (fault,) = faults(model, f"reward.parts.mine.name={file}:f")
    assert fault.startswith("reward.parts.mine.name must be a function whose parameters after the answer are fields")
    assert ", got promt, which no record of " in fault and fault.endswith("; did you mean prompt?")


def test_a_resumed_run_needs_what_it_started_from_for_reference_and_adapters_only(model: str, tmp_path: Path) -> None:
    gone = [f"output={tmp_path / 'run'}", f"checkpoint.start_from={tmp_path / 'gone'}"]
    (tmp_path / "run/checkpoints/step-00000100").mkdir(parents=True)
    assert faults(model, *gone) == []
    for needs in ("algorithm.kl_coefficient=0.1", "train.lora={}"):
        (fault,) = faults(model, *gone, needs)
        assert fault.startswith("checkpoint.start_from must be the folder"), needs


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["checkpoint.best_metric=evaluation/a/reward_mean"], "must be of a set of evaluation.sets, of which there is"),
        (
            ["checkpoint.best_metric=evaluation/hart/pass_at_4", "+evaluation.sets.hard.path=arithmetic"],
            "must be of a set of evaluation.sets, hard, got evaluation/hart/pass_at_4; did you mean hard?",
        ),
        (
            ["checkpoint.best_metric=evaluation/reward_mean", "data.evaluation_count=0", "evaluation.every_steps=0"],
            "is not measured where nothing is held out",
        ),
        (["checkpoint.best_metric=evaluation/hard/pass_at_4", "+evaluation.sets.hard.path=arithmetic"], ""),
        (["checkpoint.best_metric=evaluation/reward_mean/arithmetic"], ""),
        (
            ["checkpoint.best_metric=evaluation/reward_mean", DUEL],
            "is not measured where held_out has one attempt at each prompt, which a judge with per=group cannot",
        ),
        (["checkpoint.best_metric=train/loss", "data.evaluation_count=0", "evaluation.every_steps=0"], ""),
    ],
)
def test_checkpoints_are_chosen_by_a_metric_of_an_evaluation_that_there_is(
    model: str, overrides: list[str], why: str
) -> None:
    found = faults(model, "checkpoint.keep_best=1", *overrides)
    assert len(found) == bool(why) and all(fault.startswith(f"checkpoint.best_metric {why}") for fault in found), found


def test_evaluations_in_which_a_judge_of_pairs_has_no_say_are_warned_of() -> None:
    sets = "evaluation.sets.hard={path: arithmetic, samples_per_prompt: 4, temperature: 1}"
    assert "in evaluations with one attempt at each: held_out; judge" in caution(load("grpo_qwen3_moe", [DUEL, sets]))
    assert caution(load("grpo_qwen3_moe", [sets])) == ""


@pytest.mark.parametrize(
    "name", ["dpo", "orpo", "kto", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("simpo", "cpo"))]
)
def test_the_preference_jobs_have_no_fault(model: str, name: str) -> None:
    config = f"{name}_qwen3_moe_tiny" if name == "kto" else "dpo_qwen3_moe_tiny"
    assert faults(model, f"algorithm={name}", "evaluation.every_steps=3", config=config) == []


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (
            "dpo_qwen3_moe_tiny",
            ["train.lora.rank=4", "algorithm.reference=precomputed"],
            "algorithm.reference must be live with train.lora, got precomputed: the reference is the model without its",
        ),
        (
            "dpo_qwen3_moe_tiny",
            ["train.lora.rank=4", "algorithm.reference_update.every_steps=2"],
            "algorithm.reference_update.every_steps must be 0 with train.lora, got 2: the reference is the model",
        ),
        (
            "dpo_qwen3_moe_tiny",
            ["steps=4", "algorithm.reference_update.every_steps=4"],
            "algorithm.reference_update.every_steps must be below steps=4, got 4: the reference would never move",
        ),
        (
            "grpo_qwen3_moe",
            ["algorithm.reference_update.every_steps=2"],
            "algorithm.reference_update.every_steps has no effect without a reference, got 2; set algorithm.kl_coeffic",
        ),
        (
            "kto_qwen3_moe_tiny",
            ["prompts_per_step=1", "train.parallel=d1"],
            "prompts_per_step must be at least 2 with algorithm.name=kto, got 1: it compares each item with others of",
        ),
        (
            "embedding_qwen3_moe_tiny",
            ["prompts_per_step=1", "train.parallel=d1"],
            "prompts_per_step must be at least 2 with algorithm.name=embedding, got 1: it compares each item with",
        ),
        ("dpo_qwen3_moe_tiny", ["data.path=arithmetic"], "data: arithmetic '0+1=': expected"),
        ("kto_qwen3_moe_tiny", ["data.path=arithmetic"], "data: arithmetic '0+1=': expected 'label' or 'kto_tag'"),
    ],
)
def test_what_cannot_be_learnt_from_pairs_and_verdicts(
    model: str, config: str, overrides: list[str], expected: str
) -> None:
    (fault,) = faults(model, *overrides, config=config)
    assert fault.startswith(expected)
