"""A check in the process of a worker that torch finds the GPU that Ray has given it."""

import os
import socket

from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault


def check_cuda() -> None:
    """Checks that this process has a CUDA device.

    Raises:
        ConfigError: torch finds none; the message names the machine and the likely reason.
    """
    import torch  # noqa: PLC0415 - only workers need it

    if torch.cuda.is_available():
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} there is built without CUDA"
    else:
        why = f"torch {torch.__version__} there finds no driver, or no GPU among CUDA_VISIBLE_DEVICES={visible}"
    raise ConfigError(
        [
            Fault(
                "cluster.device",
                f"must be cpu or auto on {socket.gethostname()}, where torch finds no CUDA device",
                got="cuda",
                why=why,
                hint="`python -m rlframe.tools.doctor` there says more; start a Ray node with --num-gpus=0 if it "
                "has no GPU to train on",
            )
        ]
    )
