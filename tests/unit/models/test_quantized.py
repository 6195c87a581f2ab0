"""Quantised weights are read as what they stand for, bit for bit as their authors' own code reads them."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlframe.models import inspection
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.quantized import base, stated
from rlframe.models.quantized.fp8 import Fp8
from rlframe.models.quantized.int4 import Int4
from rlframe.models.quantized.mxfp4 import Mxfp4
from rlframe.tools import convert
from rlframe.utils.errors import CheckpointError
from tests.quantized_models import CONFIGS, quantize
from tests.tiny_models import make

pytestmark = pytest.mark.later
SOURCES = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss", "int4": "deepseek_v3"}
BFLOAT16 = torch.bfloat16


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits, so that NaN equals itself and -0 is not 0."""
    return tensor.contiguous().view(torch.uint8)


def test_fp8_by_hand() -> None:
    # 0x38 is 1, 0x01 the smallest 2**-9, 0x7e the largest 448, 0xc0 is -2. Blocks of 2 x 2, cut at both ends.
    values = torch.tensor([[0x38, 0x01, 0x7E], [0xC0, 0x38, 0x38], [0x38, 0xC0, 0x7E]], dtype=torch.uint8)
    scales = torch.tensor([[2.0, 0.5], [3.0, 0.25]])
    weight = Fp8((2, 2)).dequantize([values.view(torch.float8_e4m3fn), scales], torch.float32)
    assert weight.tolist() == [[2.0, 2**-8, 224.0], [-4.0, 2.0, 0.5], [3.0, -6.0, 112.0]]


def test_fp8_is_quantised_by_hand() -> None:
    # The largest of each block of 2 x 2: 3.5 = 448 * 2**-7, 3, none, 448 * 2**-140, whose scale would not be normal.
    weight = torch.tensor([[2.0, -1.0, 0.75, -3.0], [0.5, 3.5, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    weight[3, 3] = 448 * 2.0**-140
    values, scales = Fp8((2, 2)).quantize(weight)
    assert scales.tolist() == [[2**-7, torch.tensor(3.0).div(448).item()], [1.0, 2**-126]]
    # 0.75 and 1 of 3 are 112 and 149.33, whose neighbours are 144 and 160. 448 * 2**-14 is rounded to 14 * 2**-9.
    assert values.float().tolist() == [[256, -128, 112, -448], [64, 448, 0, 144], [0, 0, 0, 0], [0, 0, 0, 14 * 2**-9]]
    values, scales = Fp8((2, 2)).quantize(weight, powers_of_2=True)
    # 448 / 3 = 149.33 is cut to 128, so that 3 becomes 384.
    assert scales.tolist() == [[2**-7, 2**-7], [1.0, 2**-126]]
    assert values.float().tolist() == [[256, -128, 96, -384], [64, 448, 0, 128], [0, 0, 0, 0], [0, 0, 0, 14 * 2**-9]]


@pytest.mark.parametrize("powers_of_2", [False, True])
def test_fp8_quantises_what_it_stands_for_bit_for_bit(powers_of_2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # In more than one strip. Scales have few digits, so that float32 holds each product.
    monkeypatch.setattr(base, "STRIP_BYTES", 400_000)
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(512, 384, generator=generator) * 50).to(torch.float8_e4m3fn)
    values.view(4, 128, 3, 128)[:, 7, :, 9] = -448
    scales = 2.0 ** torch.randint(-20, 5, (4, 3), generator=generator)
    scales = scales if powers_of_2 else (scales * torch.rand(4, 3, generator=generator)).bfloat16().float()
    fp8 = Fp8((128, 128))
    found = fp8.quantize(fp8.dequantize([values, scales], torch.float32), powers_of_2=powers_of_2)
    assert torch.equal(bits(found[0]), bits(values)) and torch.equal(found[1], scales)


def test_fp8_of_one_scale_by_hand() -> None:
    values = torch.tensor([[0x38, 0xC0]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert Fp8(None).dequantize([values, torch.tensor(0.5)], BFLOAT16).tolist() == [[0.5, -1.0]]


def test_mxfp4_by_hand() -> None:
    # Byte 0x21 is 0.5 in the low half and 1 in the high one, 0x7f is -6 and 6, 0x80 is 0 and -0.
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, :2] = torch.tensor([0x21, 0x7F])
    blocks[0, 1, 0, 15] = 0x80
    scales = torch.tensor([[[128], [126]]], dtype=torch.uint8)
    weight = Mxfp4().dequantize([blocks, scales], BFLOAT16)
    assert weight.shape == (1, 32, 2)
    assert weight[0, :5, 0].tolist() == [1.0, 2.0, -12.0, 12.0, 0.0]
    assert weight[0, 31, 1] == 0 and weight[0, 31, 1].signbit() and not weight[0, 30, 1].signbit()


def test_int4_by_hand() -> None:
    # Digits from the right: 8 is 0, 9 is 1, 0 is -8, f is 7. The highest bit of an int32 is part of a value.
    packed = torch.tensor([[0x7FFFFFF0, -0x7FFFFFF7]], dtype=torch.int32)
    scales = torch.tensor([[0.5, 2.0]], dtype=BFLOAT16)
    weight = Int4(8).dequantize([packed, scales, torch.tensor([1, 16])], BFLOAT16)
    assert weight[0, :8].tolist() == [-4.0, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, -0.5]
    # -0x7ffffff7 is 0x80000009.
    assert weight[0, 8:].tolist() == [2.0, -16.0, -16.0, -16.0, -16.0, -16.0, -16.0, 0.0]


def test_int4_whose_columns_are_no_whole_groups_is_refused() -> None:
    stored = [torch.zeros(3, 4).int(), torch.ones(3, 2).to(BFLOAT16), torch.tensor([3, 32])]
    with pytest.raises(CheckpointError, match="tensor a_packed must have a multiple of group_size=24 columns, got 32"):
        Int4(24).read(["a_packed", "a_scale", "a_shape"], stored, BFLOAT16)


def test_fp8_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # noqa: PLC0415 - takes seconds

    # All 256 bytes, in more than one strip.
    monkeypatch.setattr(base, "STRIP_BYTES", 40_000)
    values = torch.arange(3 * 256 * 384).remainder(256).byte().view(3, 256, 384).view(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3) * 10.0 ** torch.randint(-6, 3, (3, 2, 3))
    for dtype in (BFLOAT16, torch.float32):
        reference = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
        assert torch.equal(bits(Fp8((128, 128)).dequantize([values, scales], dtype)), bits(reference))


def test_a_block_that_the_weights_end_cuts_is_that_of_a_padded_weight() -> None:
    # DeepSeek's kv_a_proj_with_mqa has 576 rows: four and a half blocks.
    values = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    padded = torch.nn.functional.pad(values.float(), (0, 126, 0, 56)).to(torch.float8_e4m3fn)
    whole = Fp8((128, 128)).dequantize([padded, scales], BFLOAT16)
    assert torch.equal(Fp8((128, 128)).dequantize([values, scales], BFLOAT16), whole[:200, :130])


@pytest.mark.thorough  # the import takes seconds
def test_mxfp4_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415 - takes seconds

    monkeypatch.setattr(base, "STRIP_BYTES", 4096)
    # Every byte under every scale but NaN's.
    blocks = torch.arange(256).byte().repeat(255, 1).view(1, 255, 16, 16)
    scales = torch.arange(255).byte().view(1, 255, 1).expand(1, 255, 16).contiguous()
    reference = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(bits(Mxfp4().dequantize([blocks, scales], BFLOAT16)), bits(reference))


@pytest.mark.thorough  # compressed-tensors takes seconds to import
def test_int4_equals_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415

    monkeypatch.setattr(base, "STRIP_BYTES", 4096)
    rules = CONFIGS["int4"]["config_groups"]["group_0"]
    packed = torch.randint(-(2**31), 2**31, (70, 12)).int()
    for dtype in (BFLOAT16, torch.float16, torch.float32):
        scales = (torch.rand(70, 3) * 10.0 ** torch.randint(-3, 2, (70, 3))).to(dtype)
        held = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([70, 96])}
        reference = PackedQuantizationCompressor.decompress(held, QuantizationScheme(**rules))["weight"]
        assert reference.dtype == dtype
        assert torch.equal(bits(Int4(32).dequantize([packed, scales, torch.tensor([70, 96])], dtype)), bits(reference))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By format: a model in bfloat16, and the same quantised."""
    found = {}
    for form, name in SOURCES.items():
        folder = tmp_path_factory.mktemp(form)
        # Of blocks of 32, an expert's width of 48 cuts one; groups must be whole.
        make(name, folder / "source", **({"moe_intermediate_size": 64} if form == "int4" else {}))
        found[form] = folder / "plain", folder / "quantized"
        quantize(folder / "source", form, plain=found[form][0], quantized=found[form][1])
    return found


@pytest.mark.parametrize("form", SOURCES)
def test_a_quantised_folder_reads_as_the_plain_one(form: str, folders: dict[str, tuple[Path, Path]]) -> None:
    plain, quantized = folders[form]
    reader, expected = CheckpointReader(quantized), load_file(plain / "model.safetensors")
    assert reader.names == sorted(expected)
    assert (quantized / "model-00002-of-00002.safetensors").stat().st_size > 0
    for name, tensor in expected.items():
        assert reader.shape(name) == tensor.shape
        assert torch.equal(bits(reader.tensor(name)), bits(tensor)), name
    assert inspection.model_faults(quantized, num_outputs=None) == []


def test_the_tool_writes_the_plain_folder(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    plain, quantized = folders["fp8"]
    convert.main(["dequantize", "--model", str(quantized), "--out", str(tmp_path / "out"), "--shard-gb", "0.0001"])
    reader = CheckpointReader(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    for name, tensor in load_file(plain / "model.safetensors").items():
        assert torch.equal(bits(reader.tensor(name)), bits(tensor)), name
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in hf and hf["dtype"] == "bfloat16"


def test_the_tool_refuses_a_plain_folder(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        convert.main(["dequantize", "--model", str(folders["fp8"][0]), "--out", str(tmp_path / "out")])
    assert "is not quantised: its config.json has no quantization_config; use it as it is" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["inf", "nan", "large", "0"])
def test_the_tool_refuses_a_size_that_is_no_number_above_0(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert.main(["dequantize", "--model", "qwen3_moe_tiny", "--out", "out", "--shard-gb", size])
    assert f"argument --shard-gb: must be a number above 0, got {size}" in capsys.readouterr().err


def spoil(folder: Path, target: Path, end: str, change: Any) -> str:
    """Copies a quantised folder with one tensor changed, or removed. Returns its name."""
    target.mkdir()
    name = ""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for each in [each for each in sorted(tensors) if each.endswith(end)][:1]:
            name, changed = each, change(tensors.pop(each))
            tensors |= {} if changed is None else {each: changed}
        save_file(tensors, target / file.name)
    index = target / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    present = {each for file in target.glob("*.safetensors") for each in load_file(file)}
    held["weight_map"] = {each: file for each, file in held["weight_map"].items() if each in present}
    index.write_text(json.dumps(held))
    return name


def first(value: Any) -> Any:
    """Returns a change that sets the first element."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("form", "end", "change", "said"),
    [
        ("fp8", "_scale_inv", lambda _: None, "without its scales"),
        ("fp8", "_scale_inv", first(float("nan")), "garbled"),
        ("fp8", "_scale_inv", lambda scales: scales[:1], "shape"),
        ("fp8", "down_proj.weight", lambda values: values.float(), "must be of F8_E4M3"),
        ("mxfp4", "_scales", lambda _: None, ""),
        ("mxfp4", "_scales", first(255), "garbled"),
        ("mxfp4", "_blocks", lambda blocks: blocks[..., :8].contiguous(), "shape"),
        ("int4", "weight_scale", lambda _: None, ""),
        ("int4", "weight_scale", first(float("inf")), "garbled"),
        ("int4", "weight_packed", lambda _: None, ""),
        ("int4", "weight_shape", first(0), "garbled"),
    ],
)
def test_a_missing_or_garbled_part_is_named(
    form: str, end: str, change: Any, said: str, folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    name = spoil(folders[form][1], tmp_path / "spoilt", end, change)
    (fault,) = inspection.model_faults(tmp_path / "spoilt", num_outputs=None)
    assert name in fault and said in fault
    weight = next(
        name.removesuffix(each) for each in ("_scale_inv", *Mxfp4.suffixes, *Int4.suffixes, "") if name.endswith(each)
    )
    with pytest.raises(CheckpointError, match=name):
        CheckpointReader(tmp_path / "spoilt").tensor(weight)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "awq"}, "quant_method must be one of fp8 .*, got 'awq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3, got 'e5m2'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format must be pack-quantized"),
        (CONFIGS["int4"] | {"config_groups": []}, "group_size must be one multiple of 8, got None"),
        (CONFIGS["int4"] | {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "weights.num_bits must be 4, got 8"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(section: dict[str, Any], said: str) -> None:
    found = stated.faults({"quantization_config": section})
    assert re.search(said, "; ".join(found))
    assert stated.quantization({"quantization_config": section}) is None


@pytest.mark.parametrize("value", [[], "x", 3, {"quantization_config": 5}])
def test_sections_of_another_kind_break_nothing(value: Any) -> None:
    assert stated.quantization({"text_config": value}) is None
    assert stated.quantization({"quantization_config": value}) is None
    assert stated.faults({"quantization_config": CONFIGS["fp8"], "dtype": [value]})


def test_config_of_a_text_model_inside_another_counts() -> None:
    inner = {"text_config": {"quantization_config": CONFIGS["mxfp4"], "dtype": "float16"}}
    assert isinstance(stated.quantization(inner), Mxfp4) and stated.dtype(inner) == torch.float16
    assert stated.without(inner) == {"text_config": {"dtype": "float16"}}


@pytest.mark.parametrize(
    ("dtype", "fault"),
    [
        *itertools.product((torch.bfloat16, torch.float16, torch.float32), (math.nan, math.inf, -math.inf)),
        (torch.float8_e4m3fn, math.nan),
    ],
)
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, fault: float) -> None:
    # Vectors of a processor and what is left at the end.
    for place in (0, 5, 16, 77, 130):
        values = torch.linspace(-3, 3, 131)
        assert base.finite(values.to(dtype)) and base.finite(values[:0].to(dtype))
        values[place] = fault
        assert not base.finite(values.to(dtype).view(1, -1))
