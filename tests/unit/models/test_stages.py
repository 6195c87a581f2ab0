"""Layers over pipeline stages and chunks, with counts worked by hand."""

from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from rlframe.models.stages import chunk_layers, parse_pipeline_layout


@pytest.mark.parametrize(
    ("num_layers", "settings", "chunks"),
    [
        (4, {"pp": 1}, [4]),
        (6, {"pp": 3}, [2, 2, 2]),
        # Two stages of two chunks: stage 0, stage 1, stage 0, stage 1.
        (8, {"pp": 2, "vpp": 2}, [2, 2, 2, 2]),
        # 9 - 1 = 8 over the two other stages.
        (9, {"pp": 3, "first_stage_layers": 1}, [1, 4, 4]),
        (9, {"pp": 3, "last_stage_layers": 3}, [3, 3, 3]),
        (9, {"pp": 4, "first_stage_layers": 2, "last_stage_layers": 1}, [2, 3, 3, 1]),
        (5, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3}, [2, 3]),
        # Stage 0 has 2 layers, stage 1 has 4, each in two chunks.
        (6, {"pp": 2, "vpp": 2, "first_stage_layers": 2}, [1, 2, 1, 2]),
        (4, {"pp": 2, "vpp": 2, "pipeline_layout": "Ett|t||tL"}, [2, 1, 0, 1]),
    ],
)
def test_layers_are_shared_out(num_layers: int, settings: dict[str, Any], chunks: list[int]) -> None:
    assert chunk_layers(num_layers, **settings) == chunks


@pytest.mark.parametrize("text", ["Et*3|(tt|)*29,t|L", "E|t|t|L", "Et|(tt|t|)*2tL", "E t t | L", "Et*4L", "E(t|t)*3L"])
def test_layout_strings_are_read_as_megatron_reads_them(text: str) -> None:
    theirs = PipelineParallelLayerLayout(text.replace(" ", ""), 1).layout[0]
    assert parse_pipeline_layout(text) == [[layer.name for layer in chunk].count("decoder") for chunk in theirs]


def test_the_example_of_the_docstring_has_32_chunks() -> None:
    assert parse_pipeline_layout("Et*3|(tt|)*29,t|L") == [3, *[2] * 29, 1, 0]


@pytest.mark.parametrize(
    ("num_layers", "settings", "message"),
    [
        (5, {"pp": 2}, "pp 2 must divide num_layers 5"),
        (2, {"pp": 4}, "pp 4 must divide num_layers 2"),
        (
            9,
            {"pp": 3, "first_stage_layers": 2},
            "the other 2 of pp 3 stages must divide num_layers 9 - first_stage_layers 2",
        ),
        (
            9,
            {"pp": 3, "last_stage_layers": 9},
            "the other 2 of pp 3 stages must divide num_layers 9 - last_stage_layers 9",
        ),
        (
            6,
            {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 3},
            "the other 0 of pp 2 stages must divide num_layers 6 - first_stage_layers 2 - last_stage_layers 3",
        ),
        (6, {"pp": 2, "vpp": 2}, r"vpp 2 must divide the 3 layers of stage 0 \(pp 2, 6 layers\)"),
        (3, {"pp": 2, "pipeline_layout": "Et|tL"}, "pipeline_layout 'Et|tL' has 2 layers, num_layers is 3"),
    ],
)
def test_what_does_not_come_out_even_is_refused(num_layers: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        chunk_layers(num_layers, **settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with E, end with L"),
        ("Ett", "must begin with E, end with L"),
        ("tE|L", "must begin with E, end with L"),
        ("Et|tLt", "must begin with E, end with L"),
        ("Et|m|L", "'m' must be one of E, t, L, .*multi-token prediction, is not supported"),
        ("Et2|L", "'2' must be one of"),
        ("E(tt|L", r"'\(' must be one of"),
    ],
)
def test_layout_strings_that_say_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        parse_pipeline_layout(text)
