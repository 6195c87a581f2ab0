"""Measured numbers of the model of memory and seconds. Everything else follows from sizes.

Each says which runs it was taken from: files of examples/benchmarks/results, on H200 with torch 2.11, Megatron-Core
0.16.1 and Transformer Engine 2.20. `examples/benchmarks/preflight.py` compares predictions with all results, those of
other runs included. They were frozen on 2026-11-25, before the cases FROZEN of preflight.py and recipes.py were
measured: none of those gave a constant or a formula.
"""

# Memory.
WORKSPACE_BYTES = 500_000_000
"""cuBLAS, cuDNN and Transformer Engine's own memory in a rank: qwen3_4b (0.5 GB) and qwen3_4b_short (0.5 GB)."""
CONTEXT_BYTES = 700_000_000
"""CUDA's context and loaded kernels of one process, which torch does not see. Not measured here."""
NCCL_BYTES = 1_000_000_000
"""NCCL's buffers of a rank with peers. Not measured here."""
LOGITS_AGAIN = 2
"""Further blocks as large as the logits that torch's allocator reserves, because smaller tensors take places in the one
that is free: a layer's after a forward pass, and moments, which first exist after the first backward pass. qwen3_4b
and qwen3_4b_fp8: 9.7 GB for logits of 4.98; 1.2 of qwen3_8b, 1.7 to 2.6 of the cuts of qwen3_30b_a3b. It gives way
under pressure."""
LOGITS_AGAIN_ASLEEP = 1
"""The same of a role that sleeps, whose moments come back before it works, or of adapters, whose moments are small:
recipes grpo_4b (3.5 GB), lora_4b (4.4), ppo_1p7b (5.0) for logits of 4.98."""
DETERMINISTIC_BYTES = 64
"""Bytes for each head and pair of tokens of a micro-batch that cuDNN's deterministic attention takes:
qwen3_4b_deterministic, 7.9 GB at 2,048 tokens of 32 heads."""
EXPERT_IMBALANCE = 1.0
"""Tokens of the busiest rank's experts, in units of the mean. Random routers are even. Trained ones are not, and
nothing says by how much."""
GRAPH_BYTES = 1_200_000_000
"""An engine's CUDA graphs for 35 batch sizes. Not measured here."""
ENGINE_WORKSPACE_BYTES = 2_500_000_000
"""An engine's activations, sampling buffers and context within its gpu_memory_utilization. Not measured here."""
ENGINE_ASLEEP_BYTES = 1_000_000_000
"""Context and buffers of an engine asleep, without its CUDA graphs. Not measured here."""

# Seconds: parts of a device's peaks.
DENSE_EFFICIENCY = 0.73
"""Matrix products over their peak: qwen3_4b, 395 TFLOP in 0.545 s."""
FP8_SPEEDUP = 1.35
"""Speed of matrix products in blockwise FP8, their casts included, over those in bfloat16: qwen3_4b_fp8."""
ATTENTION_FORWARD_EFFICIENCY = 0.52
"""Packed causal attention over the peak: qwen3_4b."""
ATTENTION_BACKWARD_EFFICIENCY = 0.34
"""The same backward, counted as twice forward: qwen3_4b."""
EXPERT_EFFICIENCY = 0.47
"""Grouped products of experts: qwen3_30b_a3b_ep2_cutlass. Between 0.43 (1,024 tokens an expert) and 0.53 (4,096)."""
JOINED_EXPERT_EFFICIENCY = 0.56
"""The same by rlframe's kernels: qwen3_30b_a3b_cut_products, 160 ms for three products of 29.7 TFLOP."""
PASSES = 8.5
"""Times that norms, rotary embedding, activations and residuals move as many bytes as a layer keeps: qwen3_4b, 257
ms."""
SORTING_PASSES = 18.0
"""Times that sorting moves the bytes of the experts' inputs, forward and backward: qwen3_30b_a3b_cut_cutlass, 54 ms."""
SORTING_PASSES_ALONE = 7.4
"""The same where all experts are on one rank: qwen3_30b_a3b_cut_products, 22 ms."""
SORTING_PASSES_ONCE = 9.4
"""The same where tokens are sent once to each rank: qwen3_30b_a3b_ep2_once_slow_host, 63 ms."""
OPTIMIZER_BANDWIDTH = 0.75
"""AdamW and the gradient norm over the memory's speed, with train.kernels.optimizer_fusion: qwen3_30b_a3b_cut_products,
47 ms."""
OPTIMIZER_BANDWIDTH_APART = 0.37
"""The same without it: qwen3_4b, 64 ms; qwen3_30b_a3b_cut_cutlass, 95 ms."""
LAUNCH_S = 59e-6
"""Seconds of the host for one kernel of a training step: qwen3_4b_short, where the device waits for them."""
FORWARD_LAUNCHES = 0.41
"""Part of a step's kernels that a forward pass has: qwen3_4b_short, logprobs."""
LAUNCHES_PER_LAYER = 86
"""Kernels of a dense layer, forward and backward: qwen3_4b, 6,287 for two micro-batches."""
LAUNCHES_PER_MOE_LAYER = 187
"""Kernels of a layer with experts besides those of each expert: qwen3_30b_a3b_cut_cutlass."""
LAUNCHES_PER_EXPERT = 1.5
"""Kernels for each expert of a rank, with train.kernels.cutlass_experts: qwen3_30b_a3b_cut_cutlass."""
LAUNCHES_PER_EXPERT_SINGLY = 6.2
"""The same without it: qwen3_30b_a3b_cut."""
REFERENCE_BANDWIDTH = 50e9
"""Bytes a second, in each direction, at which a rank exchanges its weights with the reference's in host memory, pinned:
dpo of loops_1p7b_h200, 0.13 s for twice 3.44 GB, less a forward pass by arithmetic."""
HOST_BANDWIDTH = 55e9
"""Bytes a second between pinned host memory and a device: copies measured on H200."""
COLLECTIVE_EFFICIENCY = 0.52
"""All-to-all of tokens over the speed of a link, waits for the slowest rank included: qwen3_30b_a3b_ep2_cutlass, 325 ms
for 66.5 GB."""
ONCE_EFFICIENCY = 0.24
"""The same of tokens that are sent once to each rank, in shorter messages: qwen3_30b_a3b_ep2_once, 159 ms for 15.4
GB."""
DECODE_EFFICIENCY = 0.65
"""Weights and caches read for a decode step over the memory's speed: vLLM in engines_qwen3_4b."""
DECODE_LAYER_S = 54e-6
"""Seconds of a decode step for each layer that no byte explains: vLLM in engines_qwen3_4b, one request alone."""
DECODE_SEQUENCE_S, DECODE_SEQUENCE_APART_S, DECODE_SEQUENCE_OF_RANKS_S = 30e-6, 16e-6, 45e-6
"""Seconds of a decode step for each of its sequences in which an engine's process decides what comes next, which the
device waits for if its own part is shorter. One device: rollout_vs_engine_qwen3_1p7b, 7.6 ms for 256. One device with
a process that prepares the steps: 4.2 ms for 256, in docs/engines.md. Several, whose processes are told:
grpo_30b_ep4_h200, 23 ms for 512."""
L2_BYTES = 50_000_000
"""The cache between the device's memory and its processors: data sheets of H100 and H200."""
PREFILL_EFFICIENCY = 0.62
"""Matrix products of prompts over their peak: vLLM in engines_qwen3_4b."""
GIVE_BACK_BANDWIDTH = 888e9
"""Bytes a second that a role gives back to the driver when it goes to sleep: vLLM in engines_qwen3_4b, 90.2 GB in 0.102
s."""
TAKE_BANDWIDTH = 293e9
"""Bytes a second that a role takes again when it wakes: vLLM in engines_qwen3_4b, 90.2 GB in 0.308 s."""
CALL_S = 0.055
"""Seconds of a call to the ranks that no kernel explains: dividing the batch, its way there, the results' way back.
Median of logprobs of qwen3_4b, qwen3_4b_fp8, qwen3_8b, qwen3_8b_1gpu, 4b_mlp and 4b_uniform, 0.026 to 0.082."""
SYNC_LATENCY_S = 0.02
"""Seconds of a weight sync that no byte explains: weight_sync_30b_split and weight_sync_30b_ep2."""
SYNC_EFFICIENCY = 0.95
"""Copies of a weight sync over a link's measured speed: weight_sync_30b_split."""
