"""GPUs, their driver and what torch is built for."""

from collections.abc import Iterator

from rlframe.tools.doctor.facts import Facts, Finding, warning
from rlframe.tools.doctor.stack import LEAST_CAPABILITY, LEAST_DRIVER, release


def driver(facts: Facts) -> Iterator[Finding]:
    """Finds a driver that does not answer, or is too old for torch's CUDA."""
    gpus = facts.gpus
    if gpus.error:
        yield Finding(what=f"the driver does not answer: {gpus.error}", mend="sudo dmesg | grep -i nvrm")
    if not gpus.driver or not gpus.torch_cuda:
        return
    least = LEAST_DRIVER.get(release(gpus.torch_cuda)[0])
    if least and release(gpus.driver)[0] < least:
        yield Finding(
            what=f"torch is built for CUDA {gpus.torch_cuda}, which needs driver {least} or newer, found {gpus.driver}",
            mend=f"sudo apt-get install --yes nvidia-driver-{least}-server && sudo reboot",
        )


def torch_build(facts: Facts) -> Iterator[Finding]:
    """Finds a torch for CPUs on a machine with GPUs."""
    version = facts.packages.get("torch", "")
    if facts.gpus.devices and version and not facts.gpus.torch_cuda:
        plain = version.partition("+")[0]
        yield Finding(
            what=f"torch {version} is built for CPUs, and this machine has {len(facts.gpus.devices)} GPUs",
            mend=f'pip install --force-reinstall "torch=={plain}" --index-url https://download.pytorch.org/whl/cu130',
        )


def capability(facts: Facts) -> Iterator[Finding]:
    """Finds GPUs for which torch has no kernels, and GPUs of several kinds."""
    devices = facts.gpus.devices
    for index, device in enumerate(devices):
        if device.capability and device.capability < LEAST_CAPABILITY:
            least, own = (".".join(map(str, one)) for one in (LEAST_CAPABILITY, device.capability))
            yield Finding(
                what=f"GPU {index}, {device.name}, has compute capability {own}; torch needs {least}",
                mend=f"export CUDA_VISIBLE_DEVICES={','.join(_usable(facts))}",
            )
    if len({device.name for device in devices}) > 1:
        first = [str(index) for index, device in enumerate(devices) if device.name == devices[0].name]
        yield warning(
            f"the GPUs are of several kinds, {', '.join(sorted({device.name for device in devices}))}: all wait for "
            "the slowest, and the smallest memory counts",
            f"export CUDA_VISIBLE_DEVICES={','.join(first)}",
        )


def peer_access(facts: Facts) -> Iterator[Finding]:
    """Finds pairs of GPUs that copy through host memory."""
    if pairs := facts.gpus.without_peer_access:
        yield warning(
            f"GPUs {', '.join(pairs)} cannot read each other's memory, so that their traffic takes the way over the "
            "host; an IOMMU or a virtual machine may forbid it",
            "sudo sed -i 's/GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub && sudo reboot",
        )


def _usable(facts: Facts) -> list[str]:
    devices = enumerate(facts.gpus.devices)
    return [str(index) for index, device in devices if device.capability >= LEAST_CAPABILITY]


CHECKS = (driver, torch_build, capability, peer_access)
