"""The settings of each side of step_vs_peers.py: the same work, the fastest way that each side documents, in 80 GB."""

from pathlib import Path
from typing import Any

from peers.inputs import Workload

BENCHMARKS = Path(__file__).resolve().parents[1]


def engine_share(workload: Workload) -> float:
    """Returns the part of the device's memory that vLLM may fill: its weights, and keys and values of a whole step.

    A prompt's are held once for its group.
    """
    return 0.25 if workload.prompt_tokens > 1024 else 0.35


LR = 1e-6


def rlframe_settings(workload: Workload, folder: Path, output: Path, *, cuda: bool) -> dict[str, Any]:
    """Returns overrides of `grpo_qwen3_moe`. The value None marks a group of the configuration."""
    settings: dict[str, Any] = {
        "output": output,
        # Ended after the counted steps, because its end would save a checkpoint.
        "steps": 1000,
        "prompts_per_step": workload.prompts,
        "algorithm.group_size": workload.group,
        "model.path": folder / "model",
        "data.path": folder / "prompts.jsonl",
        "data.max_prompt_tokens": workload.prompt_tokens + 8,
        "data.evaluation_count": 0,
        "data.shuffle": "false",
        "reward.parts.exact_match.name": f"{BENCHMARKS / 'even_characters.py'}:score",
        "rollout.max_tokens": workload.response_tokens,
        "train.optimizer.lr": LR,
        "train.share_prompts": "true",
        "checkpoint.on_signal_s": 0,
        "checkpoint.every_steps": 0,
        "evaluation.every_steps": 0,
        "logging.progress": "false",
        "logging.tensorboard": "false",
    }
    if not cuda:
        small = {"train.parallel": "d1", "train.dtype": "float32"}
        return settings | small | {"rollout.min_tokens": workload.response_tokens}
    groups = dict.fromkeys(("rollout=vllm", "train=cuda", "cluster=cuda"))
    settings |= {
        "rollout.num_engines": 1,
        "+rollout.max_model_len": workload.sequence_tokens,
        "+rollout.max_num_seqs": workload.responses,
        "+rollout.gpu_memory_utilization": engine_share(workload),
        "train.dtype": "bfloat16",
        # Two groups of `equal`, whose prompt counts once; more than the longest sequence of `tail`. vLLM sleeps then,
        # and has the memory of it while it samples.
        "+train.max_tokens_per_microbatch": 8704,
        "train.release_memory": "true",
        "cluster.preflight": "off",
    }
    if not workload.mean_tokens:
        return groups | settings | {"rollout.min_tokens": workload.response_tokens}
    return groups | settings | {
        "rollout.name": f"{BENCHMARKS / 'async_rl_engine.py'}:LengthsVllm",
        "+rollout.mean_tokens": workload.mean_tokens,
        "+rollout.sigma": workload.sigma,
        "+rollout.running_log": output.parent,
    }  # fmt: skip


def trl_settings(workload: Workload, *, cuda: bool) -> dict[str, Any]:
    """Returns fields of GRPOConfig beyond those that trl_worker.py sets.

    Without the correction of vLLM's logprobs TRL computes no old logprobs. With short sequences a micro-batch fits
    without recomputation, and one of 8 sequences, with vLLM asleep, was faster than one of 4 beside vLLM awake.
    """
    if not cuda:
        return {}
    long = workload.sequence_tokens > 1024
    rows = min(4 if long else 8, workload.responses)
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": workload.responses // rows,
        "steps_per_generation": workload.responses // rows,
        "gradient_checkpointing": long,
        "vllm_enable_sleep_mode": not long,
        "vllm_gpu_memory_utilization": engine_share(workload),
        "vllm_max_model_length": workload.sequence_tokens,
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"ignore_eos": True},
    }


def verl_settings(workload: Workload, folder: Path, run: Path, *, steps: int) -> dict[str, Any]:
    """Returns overrides of verl's trainer with Megatron-Core and vLLM on one GPU.

    Old logprobs are those of the rollout (`bypass_mode`). Micro-batches are packed (`use_dynamic_bsz`).
    """
    settings: dict[str, Any] = common_verl_settings(workload, folder, run)
    return settings | {
        "trainer.use_v1": "False",
        "data.train_batch_size": workload.prompts,
        "actor_rollout_ref.actor.ppo_mini_batch_size": workload.prompts,
        "actor_rollout_ref.rollout.n": workload.group,
        "actor_rollout_ref.rollout.gpu_memory_utilization": engine_share(workload),
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": steps,
    }


def verl_async_settings(workload: Workload, folder: Path, run: Path, *, steps: int) -> dict[str, Any]:
    """Returns overrides of verl's fully asynchronous trainer: one GPU trains, one samples, as much ahead as a lag of 1,
    and a sync after every step."""
    settings: dict[str, Any] = common_verl_settings(workload, folder, run)
    return settings | {
        "actor_rollout_ref.hybrid_engine": "False",
        "actor_rollout_ref.actor.ppo_mini_batch_size": workload.prompts,
        # This mode makes the optimizer before it counts its steps, which are -1 then; Megatron-Core refuses that.
        "actor_rollout_ref.actor.optim.total_training_steps": steps + 3,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
        "actor_rollout_ref.rollout.n": workload.group,
        "data.train_batch_size": 0,
        "data.gen_batch_size": 1,
        "rollout.nnodes": 1,
        "rollout.n_gpus_per_node": 1,
        "rollout.n": workload.group,
        "rollout.total_rollout_steps": workload.prompts * (steps + 3),
        "async_training.staleness_threshold": 1.0,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": "True",
        "async_training.concurrent_samples_per_replica": 2 * workload.prompts,
        "trainer.total_epochs": 1,
    }


def common_verl_settings(workload: Workload, folder: Path, run: Path) -> dict[str, Any]:
    """Returns what verl's synchronous and asynchronous trainers have in common."""
    actor, megatron = "actor_rollout_ref.actor", "actor_rollout_ref.actor.megatron"
    rollout = "actor_rollout_ref.rollout"
    settings: dict[str, Any] = {
        "model_engine": "megatron",
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": "True",
        "data.train_files": f"['{folder / 'prompts_verl.jsonl'}']",
        "data.val_files": f"['{folder / 'prompts_verl.jsonl'}']",
        "data.max_prompt_length": workload.prompt_tokens + 8,
        "data.max_response_length": workload.response_tokens,
        "data.shuffle": "False",
        "data.dataloader_num_workers": 0,
        "data.truncation": "error",
        "actor_rollout_ref.model.path": folder / "model",
        # mbridge 0.15 reads it off the configuration, where transformers 5 has it in rope_parameters.
        "+actor_rollout_ref.model.override_config.rope_theta": 1_000_000.0,
        "actor_rollout_ref.model.use_remove_padding": "True",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "False",
        f"{actor}.optim.lr": LR,
        f"{actor}.use_kl_loss": "False",
        f"{actor}.use_dynamic_bsz": "True",
        f"{actor}.ppo_max_token_len_per_gpu": max(10240, workload.sequence_tokens),
        f"{megatron}.vanilla_mbridge": "True",
        f"{megatron}.override_transformer_config.attention_backend": "fused",
        f"{megatron}.override_transformer_config.recompute_granularity": "null",
        f"{rollout}.name": "vllm",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.max_num_seqs": workload.responses,
        f"{rollout}.max_model_len": workload.sequence_tokens,
        f"{rollout}.ignore_eos": "True",
        # Each has whole groups, whose lengths it counts.
        f"{rollout}.agent.num_workers": min(8, workload.prompts),
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": BENCHMARKS / "peers/verl_lengths.py",
        # Never the cluster of another side.
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.include_dashboard": "False",
        "trainer.logger": "['console','file']",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": "False",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": run / "checkpoints",
    }
    if workload.mean_tokens:
        settings |= {
            f"{rollout}.agent.default_agent_loop": "forced_lengths",
            f"{rollout}.agent.agent_loop_config_path": BENCHMARKS / "peers/verl_lengths.yaml",
        }
    return settings
