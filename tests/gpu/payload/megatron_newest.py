"""Packs what a GPU host without a network lacks for Megatron-Core's newest release and for kernels of gated delta nets.

    python tests/gpu/payload/megatron_newest.py OUT

writes OUT/part0, a tar of two folders that go on PYTHONPATH before the packages that the host has, and
OUT/versions.json. `extras` has flash-linear-attention's kernels, one configuration of each (below), and what tests, the
search recipe and reports import; `newest` has Megatron-Core. The host has Python 3.12 on x86-64.

    mkdir -p ~/overlay && tar xJf part0 -C ~/overlay
    PYTHONPATH=~/overlay/extras:~/site ...                       (its own Megatron-Core)
    PYTHONPATH=~/overlay/newest:~/overlay/extras:~/site ...      (the newest)

Triton would compile about 140 configurations of flash-linear-attention's kernels and time them, at the first step of
every process. With FLA_CACHE_MODE=default and FLA_CONFIG_DIR=~/overlay/extras/configs it takes those of CONFIGS, which
are of the ones that it would try on Hopper and are not tuned.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

NEWEST = ("megatron-core==0.19.2",)
EXTRAS = (
    "fla-core==0.6.0",
    "einops>=0.8",
    "beartype>=0.20",
    "jaxtyping>=0.3",
    "wadler-lindig>=0.1",
    "bm25s>=0.3.16,<0.4",
    "plotly>=6,<8",
    "narwhals>=1.15",
)
WHEELS = ("--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64", "any")
LIMIT_BYTES = 40_000_000
CONFIGS: dict[str, tuple[dict[str, int], int, int]] = {
    "l2norm_fwd_kernel": ({"BT": 32}, 4, 3),
    "l2norm_bwd_kernel": ({"BT": 32}, 4, 3),
    "chunk_local_cumsum_scalar_kernel": ({}, 1, 3),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 4, 3),
    "recompute_w_u_fwd_kernel": ({}, 4, 3),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 3),
    "chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "chunk_bwd_kernel_dv_local": ({}, 4, 3),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 3),
    "prepare_wy_repr_bwd_kernel": ({}, 4, 3),
    "causal_conv1d_fwd_kernel": ({"BD": 64}, 4, 3),
    "causal_conv1d_bwd_kernel": ({"BD": 64}, 4, 3),
}
"""Blocks, warps and stages of each kernel."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        versions = {
            name: unpacked(packages, root / name) for name, packages in (("newest", NEWEST), ("extras", EXTRAS))
        }
        write_configs(root / "extras/configs")
        part = out / "part0"
        subprocess.run(["tar", "cJf", str(part), "-C", str(root), "newest", "extras"], check=True)
    if part.stat().st_size > LIMIT_BYTES:
        raise SystemExit(f"{part} has {part.stat().st_size:,} bytes, more than {LIMIT_BYTES:,}")
    (out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")
    print(f"{part}: {part.stat().st_size / 1e6:.1f} MB, {versions}")


def unpacked(packages: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Unpacks the wheels of `packages`, none that they depend on, and returns the version of each."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as wheels:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *WHEELS, *platforms, "-d", wheels]
        subprocess.run([*pip, *packages], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    found = (Distribution.at(each) for each in folder.glob("*.dist-info"))
    return {each.metadata["Name"]: each.version for each in found}


def write_configs(folder: Path) -> None:
    """Writes a file for each kernel of CONFIGS, as flash-linear-attention reads them."""
    folder.mkdir()
    for kernel, (blocks, warps, stages) in CONFIGS.items():
        config = {"kwargs": blocks, "num_warps": warps, "num_stages": stages, "num_ctas": 1}
        (folder / f"{kernel}.json").write_text(json.dumps({"kernel_name": kernel, "default_config": config}))


if __name__ == "__main__":
    main()
