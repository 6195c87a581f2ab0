"""Seeds of requests. Light: the runner of attempts imports it, and needs no torch."""

import hashlib


def request_seed(
    *,
    run_seed: int,
    prompt_id: str,
    sample_index: int,
    step: int,
    epoch: int = 0,
    turn: int = 0,
    again: int = 0,
    repeat: int = 0,
) -> int:
    """Returns the seed of one request, in [0, 2^63): the same in every process and every run with the same
    arguments."""
    when = f"{step}.{again}" if again else f"{step}"
    if epoch:
        when = f"{step}.{again}.{epoch}"
    if repeat:
        when = f"{step}.{again}.{epoch}.{repeat}"
    text = f"{run_seed} {when} {sample_index} {turn} {prompt_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
