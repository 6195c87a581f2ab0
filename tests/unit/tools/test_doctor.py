"""Which packages go together."""

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


def test_a_missing_package_and_a_wrong_release_are_named() -> None:
    assert list(problems(GOOD | {"ray": None, "megatron-core": "0.17.0"})) == [
        "ray is missing: pip install -e .",
        "megatron-core must be 0.16.x, found 0.17.0",
    ]
