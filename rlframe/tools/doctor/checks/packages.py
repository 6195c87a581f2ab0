"""Releases of packages: whether they are allowed, go together, and have been run."""

from collections.abc import Iterator

from rlframe.tools.doctor.facts import Facts, Finding, warning
from rlframe.tools.doctor.stack import (
    CPU,
    ENGINES,
    FLASH_ATTENTION,
    GPU,
    LEAST_CUDNN,
    TRANSFORMER_ENGINE,
    Engine,
    allows,
    package,
    packages,
    release,
)

INSTALL = "pip install"
COMPILED = {"vllm": "vllm", "sglang": "sglang-kernel"}
"""The package that is compiled against torch, by engine. SGLang itself is Python, and CPUs do without its kernels."""


def missing(facts: Facts) -> Iterator[Finding]:
    """Finds packages that rlframe always needs."""
    for one in packages(facts.system.python):
        if one.spec and not one.extra and one.name not in facts.packages:
            yield Finding(what=f"{one.name} is missing", mend=f'{INSTALL} "{one.requirement}"')


def refused(facts: Facts) -> Iterator[Finding]:
    """Finds releases that pyproject.toml does not allow. Engines are judged by `unmatched` and `untried`."""
    for one in packages(facts.system.python):
        version = facts.packages.get(one.name)
        if version and one.name not in COMPILED and not allows(one.spec, version):
            yield Finding(what=f"{one.name} must be {one.spec}, found {version}", mend=f'{INSTALL} "{one.requirement}"')


def unmatched(facts: Facts) -> Iterator[Finding]:
    """Finds engines whose compiled parts are built against another torch."""
    torch = facts.packages.get("torch")
    for name in COMPILED:
        engine = _engine(facts, name)
        if engine and torch and COMPILED[name] in facts.packages and not torch.startswith(f"{engine.torch}."):
            fitting = next((one for one in ENGINES if one.name == name and torch.startswith(f"{one.torch}.")), None)
            mend = f'{INSTALL} "torch=={engine.torch}.*"'
            if fitting and fitting.ran:
                mend = f'{INSTALL} "{name}=={fitting.ran}"'
            version = facts.packages[name]
            yield Finding(what=f"{name} {version} is built against torch {engine.torch}, found {torch}", mend=mend)


def untried(facts: Facts) -> Iterator[Finding]:
    """Finds releases of engines that rlframe has not been run with on such a machine."""
    kind = GPU if facts.gpus.devices else CPU
    for name in COMPILED:
        version, engine = facts.packages.get(name), _engine(facts, name)
        if not version or (engine and engine.ran and engine.on == kind):
            continue
        ran = [one for one in ENGINES if one.name == name and one.ran and one.on == kind]
        if ran and not (engine and engine.on == GPU):
            known = ran[-1]
            yield warning(
                f"{name} {version} has not been run with rlframe on a {kind}; {known.ran} has, with torch "
                f"{known.torch}",
                f'{INSTALL} "{name}=={known.ran}"',
            )


def transformer_engine(facts: Facts) -> Iterator[Finding]:
    """Finds a Transformer Engine without its part for torch, or with libraries that it does not use."""
    if "transformer-engine" not in facts.packages:
        if facts.gpus.devices:
            yield Finding(
                what="transformer-engine is missing, without which ranks cannot train on GPUs", mend=_build_command()
            )
        return
    if "transformer-engine-torch" not in facts.packages:
        yield Finding(what="transformer-engine is installed without its part for torch", mend=_build_command())
    cudnn = facts.packages.get("cudnn")
    if cudnn and release(cudnn) < release(LEAST_CUDNN):
        yield Finding(
            what=f"transformer-engine needs cuDNN {LEAST_CUDNN} or newer, found {cudnn}",
            mend=f'{INSTALL} "nvidia-cudnn-cu13>={LEAST_CUDNN}"',
        )
    flash, (oldest, newest) = facts.packages.get("flash-attn"), FLASH_ATTENTION
    if flash and not release(oldest) <= release(flash) <= release(newest):
        yield warning(
            f"transformer-engine {TRANSFORMER_ENGINE} uses flash-attn {oldest} to {newest} and passes over {flash}; "
            "it needs none, as cuDNN has attention",
            "pip uninstall --yes flash-attn",
        )


def headers(facts: Facts) -> Iterator[Finding]:
    """Finds headers that are missing to build Transformer Engine's part for torch."""
    if not facts.gpus.devices or "transformer-engine-torch" in facts.packages:
        return
    for header, distribution in (("cudnn.h", "nvidia-cudnn-cu13"), ("nccl.h", "nvidia-nccl-cu13")):
        if header not in facts.gpus.headers:
            yield warning(
                f"no {header} is found, with which transformer-engine's part for torch is built",
                f"{INSTALL} {distribution}",
            )


def _build_command() -> str:
    one = package("transformer-engine")
    # Built against the torch that is installed, hence without build isolation.
    return f'{INSTALL} --no-build-isolation "{one.name}[{one.parts}]=={TRANSFORMER_ENGINE}"'


def _engine(facts: Facts, name: str) -> Engine | None:
    version = facts.packages.get(name)
    known = (one for one in ENGINES if one.name == name and version and one.first <= release(version) < one.below)
    return next(known, None)


CHECKS = (missing, refused, unmatched, untried, transformer_engine, headers)
