"""Packs SGLang for a GPU machine without a network, in parts of at most 48 MB.

    python tests/gpu/payload/sglang.py path/to/payload.py OUT

`payload.py` is the tool that packs vLLM, Ray and Megatron-Core for the same machine (Python 3.12 on x86-64, torch 2.11
for CUDA 13, Hopper): its `build` makes the parts, here of PACKAGES. Some of them clash with what vLLM needs, so they
have a folder of their own, which runs with SGLang have before the other. On the machine, with OUT/*/part* in ~/sglang:

    mkdir -p ~/sglang_site && cat ~/sglang/part* | xz -dc | tar x -C ~/sglang_site
    export PYTHONPATH=$HOME/sglang_site:$HOME/site

SGLang compiles further kernels there when it first needs them, with the machine's nvcc and ninja, and keeps them in
~/.cache/tvm-ffi. `--kernels` packs such a folder of a machine with the same nvcc, as `kernels` beside the last part:

    mkdir -p ~/.cache/tvm-ffi && tar xJf ~/sglang/kernels -C ~/.cache/tvm-ffi

Left out are the kernels of FlashAttention 3 for float16, and of those for keys that are not as wide as values
(multi-head latent attention) one of two copies.
"""

import argparse
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from peers import HOPPER, loaded

PACKAGES = (
    "sglang==0.5.17",
    "sglang-kernel==0.4.5",
    "flashinfer-python==0.6.15.post1",
    "apache-tvm-ffi==0.1.11",
    "torch-memory-saver==0.0.10",
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "gguf==0.19.0",
    "ipython==9.18.1",
    "orjson==3.13.0",
    "traitlets==5.16.1",
    "zstandard==0.25.0",
)
"""What SGLang imports on the way from `Engine` to a model's first tokens, and neither the machine nor payload.py has in
its version."""
SKIP = (
    "build_backend.py",
    "build_utils.py",
    "ipython-9.18.1.data/",
    "sgl_kernel/flashmla_ops",
    "sgl_kernel/sm100/",
    "sglang/benchmark/",
    "sglang/multimodal_gen/",
    "sglang/test/",
    "tools/",
    "torch_memory_saver_hook_mode_preload.abi3.so",
    "torch_memory_saver_hook_mode_preload_cu12",
    "torch_memory_saver_hook_mode_torch.abi3.so",
    "torch_memory_saver_hook_mode_torch_cu12",
)
KEPT, DROPPED = (b"10bfloat16_tEf", b"12float_e4m3_tEf"), b"6half_tEf"
"""The types of queries and keys in the names of FlashAttention's kernels."""
SIZE_AT = 8
"""Where the header of an image has the bytes of its code."""
COMPRESSED = 0x8000
"""Bit in the flags of an image. In FlashAttention's library such images repeat kernels whose keys are not as wide as
their values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", type=Path, help="payload.py")
    parser.add_argument("out", type=Path, help="folder of the parts; what is in it is deleted")
    parser.add_argument("--part-mb", type=int, default=48)
    parser.add_argument("--kernels", type=Path, help="a folder ~/.cache/tvm-ffi")
    arguments = parser.parse_args()
    tool = loaded(arguments.tool)
    architectures = tool.slim

    def slim(library: Path, architecture: int) -> int:
        dropped = architectures(library, architecture)
        if library.name.startswith("flash_ops"):
            dropped += without_float16(library, architecture, tool.FATBIN)
        return dropped

    tool.SKIP, tool.slim = SKIP, slim
    with tempfile.TemporaryDirectory() as folder:
        # The tool reads requirements.txt and wheels/ beside itself.
        tool.HERE = Path(folder)
        (tool.HERE / "requirements.txt").write_text("\n".join(PACKAGES) + "\n")
        tool.build(arguments.out, [], HOPPER, arguments.part_mb)
    if arguments.kernels:
        libraries = [str(each.relative_to(arguments.kernels)) for each in sorted(arguments.kernels.glob("*/*.so"))]
        packed = max(arguments.out.glob("*/part*")).with_name("kernels")
        subprocess.run(["tar", "cJf", str(packed), "-C", str(arguments.kernels), *libraries], check=True)
        print(f"{packed}: {len(libraries)} kernels")


def without_float16(library: Path, architecture: int, magic: bytes) -> int:
    """Puts the smallest image in the place of those whose kernels are for float16 alone, and returns the bytes dropped.

    An image that the CUDA driver reads stays where there was one, without the kernels that are not called.
    """
    content = bytearray(library.read_bytes())
    kept, dropped = [], []
    for arch, flags, start, data, end in images_of(content, magic):
        if arch == architecture:
            stays = any(content.find(name, data, end) >= 0 for name in KEPT)
            leaves = flags & COMPRESSED or (content.find(DROPPED, data, end) >= 0 and not stays)
            (dropped if leaves else kept).append((start, data, end))
    start, data, end = min(kept, key=lambda each: each[2] - each[0])
    header, smallest = content[start:data], content[data:end]
    for start, data, end in dropped:
        assert data - start == len(header) and end - data >= len(smallest), f"{library}: no room for another image"
        struct.pack_into("<Q", header, SIZE_AT, end - data)
        content[start:end] = header + smallest.ljust(end - data, b"\0")
    library.write_bytes(content)
    return sum(end - data - len(smallest) for _, data, end in dropped)


def images_of(content: bytearray, magic: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields the images of GPU code of a library: architecture, flags, and where header and code begin and end."""
    position = content.find(magic)
    while position >= 0:
        (size,) = struct.unpack_from("<Q", content, position + 8)
        at, stop = position + 16, position + 16 + size
        while at < stop:
            header, length = struct.unpack_from("<IQ", content, at + 4)
            architecture, flags = struct.unpack_from("<I8xQ", content, at + 28)
            data, end = at + header, at + header + length
            yield architecture, flags, at, data, end
            at = end
        position = content.find(magic, stop)


if __name__ == "__main__":
    main()
