"""Which packages go together."""

import pytest

from rlframe.tools.doctor import PACKAGES, problems

GOOD = dict.fromkeys(PACKAGES, None) | {
    "torch": "2.11.0+cu130",
    "megatron-core": "0.16.1",
    "ray": "2.60.0",
    "transformers": "5.23.0",
    "vllm": "0.26.0",
}


def test_a_set_that_goes_together_has_no_problem() -> None:
    assert list(problems(GOOD)) == []


def test_a_vllm_built_against_another_torch_is_named() -> None:
    assert list(problems(GOOD | {"torch": "2.13.0+cpu"})) == [
        "vllm 0.26.0 is built against torch 2.11, found 2.13.0+cpu"
    ]


@pytest.mark.parametrize(
    ("sglang", "needed"),
    # The last release of each torch and the first of the next.
    [("0.5.11", "2.11"), ("0.5.17", "2.11"), ("0.5.18", "2.13"), ("0.5.21.post1", "2.13"), ("0.5.22", "2.14")],
)
def test_an_sglang_built_against_another_torch_is_named(sglang: str, needed: str) -> None:
    versions = GOOD | {"vllm": None, "sglang": sglang, "sglang-kernel": "0.4.5", "torch": "2.12.0"}
    assert list(problems(versions)) == [f"sglang {sglang} is built against torch {needed}, found 2.12.0"]
    fitting = versions | {"torch": f"{needed}.0+cu130"}
    assert not [problem for problem in problems(fitting) if "built against" in problem]


def test_an_sglang_without_kernels_goes_with_any_torch() -> None:
    assert list(problems(GOOD | {"sglang": "0.5.23"})) == []


def test_two_engines_that_want_different_torches_cannot_both_be_content() -> None:
    versions = GOOD | {"sglang": "0.5.18", "sglang-kernel": "0.4.6"}
    assert list(problems(versions)) == ["sglang 0.5.18 is built against torch 2.13, found 2.11.0+cu130"]


def test_a_missing_package_and_a_wrong_release_are_named() -> None:
    assert list(problems(GOOD | {"ray": None, "megatron-core": "0.17.0"})) == [
        "ray is missing: pip install -e .",
        "megatron-core must be 0.16.x, found 0.17.0",
    ]
