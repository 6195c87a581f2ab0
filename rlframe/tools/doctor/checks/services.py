"""The hub and its cache, and Ray."""

from collections.abc import Iterator

from rlframe.tools.doctor.facts import Facts, Finding, warning

TOKEN = "token"


def hub(facts: Facts) -> Iterator[Finding]:
    """Finds a cache that cannot be written, and a hub that cannot be reached."""
    found = facts.hub
    if found.cache and not found.is_writable:
        yield Finding(
            what=f"the cache of the hub, {found.cache}, cannot be written", mend="export HF_HOME=FOLDER  # of yours"
        )
    if found.error:
        yield warning(
            f"the hub at {found.endpoint} cannot be reached ({found.error}): each model and dataset must be a folder, "
            f"or be in {found.cache}",
            "export HF_HUB_OFFLINE=1\nexport HF_ENDPOINT=URL  # of a mirror",
        )


def ray(facts: Facts) -> Iterator[Finding]:
    """Finds a Ray that anyone who reaches it may use, and one whose token is missing."""
    found = facts.ray
    if found.auth_mode == TOKEN and not found.has_token:
        yield Finding(what="RAY_AUTH_MODE is token, and there is no token", mend="ray get-auth-token --generate")
    if (found.address or found.is_running) and found.auth_mode != TOKEN:
        where = found.address or "this machine"
        yield warning(
            f"Ray at {where} is not asked for a token: anyone who reaches its ports can run code as its user",
            "ray get-auth-token --generate && export RAY_AUTH_MODE=token  # on every node, before `ray start`",
        )
    if found.is_running and not found.address:
        yield warning(
            "a Ray cluster runs on this machine, and runs start a Ray of their own beside it",
            "export RAY_ADDRESS=auto  # to use it\nray stop",
        )


CHECKS = (hub, ray)
