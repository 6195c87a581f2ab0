"""What the template of all ranks has imported; see `tests.multiprocess.distributed`."""

import os
import warnings

# Megatron warns of every package that is not installed.
with warnings.catch_warnings(action="ignore"):
    # torch's optimizers ask for it at their first step.
    import torch._dynamo  # noqa: F401
    import transformers

    import tests.tiny_models  # noqa: F401
    from rlframe.cluster.config import Device
    from rlframe.megatron.cpu import platform

    # A model's file is imported when its name is first asked for.
    _ = transformers.AutoModelForCausalLM, transformers.Qwen3ForCausalLM, transformers.Qwen3MoeForCausalLM

    platform.install(platform.resolve(Device.CPU))
    from rlframe.megatron.worker import trainer  # noqa: F401

assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
