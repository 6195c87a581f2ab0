"""The ladder finds causes that are planted between a real rank and a real engine, and explains rounding."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiprocess.distributed import run_distributed
from tests.rollout_models import make_with_tokenizer

pytestmark = pytest.mark.later


def nothing(sides: Any) -> None:
    """The sides differ by rounding only."""


def wrong_temperature(sides: Any) -> None:
    """The engine divides by 0.6, whatever it is told."""
    sides.engine_temperature = 0.6


def stale_layer(sides: Any) -> None:
    """One layer's projection is that of an older step, until the weights are sent again."""
    sides.engine_behind.model.model.layers[1].self_attn.o_proj.weight.mul_(0.8)
    sides.stale = "model.layers.1.self_attn.o_proj.weight differs"


def other_experts(sides: Any) -> None:
    """The trainer's routers leave out their first choice, unless they are told what to choose."""
    for module in sides.rank.model.chunks[0].modules():
        if type(module).__name__ == "TopKRouter":
            replay = module.router_replay
            replay.get_replay_topk = partial(choosing_others, replay.get_replay_topk)


def choosing_others(choose: Callable[..., Any], scores: Any, topk: int, *given: Any) -> Any:
    """What a router chooses, with its second to last choices for its first to last."""
    *groups, native = given

    def without_first(scores: Any, topk: int, **more: Any) -> Any:
        values, experts = native(scores, topk + 1, **more)
        return values[:, 1:], experts[:, 1:]

    return choose(scores, topk, *groups, without_first)


def without_softcap(sides: Any) -> None:
    """The engine caps its logits, the trainer does not."""
    head = sides.engine_behind.model.lm_head
    head.register_forward_hook(lambda module, arguments, logits: 2.0 * torch.tanh(logits / 2.0))


PLANTS = {plant.__name__: plant for plant in (nothing, wrong_temperature, stale_layer, other_experts, without_softcap)}


def on_rank(rank: int, init_method: str, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Climbs the ladder for each case, one after the other."""
    from rlframe.megatron.worker import parallel
    from tests.multiprocess.megatron.gap_sides import LocalSides, climb

    found = []
    for number, (plant, settings) in enumerate(cases):
        sides = LocalSides(Path(folder), f"{init_method}-{number}", PLANTS[plant], **settings)
        found.append(climb(sides, Path(folder)))
        parallel.shutdown()
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rounding": ("nothing", {"dtype": "bfloat16"}),
    "exact": ("nothing", {"dtype": "bfloat16", "exact": True}),
    "temperature": ("wrong_temperature", {}),
    "weights": ("stale_layer", {}),
    "routing": ("other_experts", {}),
    "softcap": ("without_softcap", {}),
}


@pytest.fixture(scope="module")
def climbs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The climb of each case. All in one process, which is the dearest part."""
    folder = make_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))
    (found,) = run_distributed(on_rank, 1, str(folder), list(CASES.values()))
    return dict(zip(CASES, found, strict=True))


def share(climbs: dict[str, Any], case: str, name: str) -> float:
    """What the rung `name` explains of the gap of `case`."""
    (step,) = (step for step in climbs[case][0].steps if step.names == (name,))
    return step.explained


def test_the_ladder_explains_rounding_of_a_mixture_in_bfloat16(climbs: dict[str, Any]) -> None:
    found, said = climbs["rounding"]
    assert found.first.mean_nats > 1e-3
    assert found.explained > 0.9
    assert found.rest.mean_nats < 1e-4
    assert [step.names[0] for step in found.steps if step.after] == [
        "weights", "temperature", "routing", "prefill", "batch", "head", "float32",
    ]  # fmt: skip
    assert said == ["nothing remains above the rounding of float32"]


def test_exact_sides_agree_to_1e_4_nats_on_bfloat16_weights(climbs: dict[str, Any]) -> None:
    found, _ = climbs["exact"]
    assert found.first.max_nats < 1e-4
    assert found.first.num_tokens == climbs["rounding"][0].first.num_tokens
    assert not found.steps


@pytest.mark.parametrize("cause", ["temperature", "weights", "routing"])
def test_a_planted_cause_is_found_by_its_rung_and_no_other(climbs: dict[str, Any], cause: str) -> None:
    found, _ = climbs[cause]
    assert found.first.mean_nats > 0.02
    assert share(climbs, cause, cause) > 0.9
    others = [step for step in found.steps if step.names != (cause,)]
    assert all(abs(step.explained) < 0.05 for step in others)


def test_a_rung_says_what_it_found(climbs: dict[str, Any]) -> None:
    said = {step.names[0]: step.found for case in ("temperature", "weights") for step in climbs[case][0].steps}
    assert said["weights"] == "model.layers.1.self_attn.o_proj.weight differs"
    (fit,) = (step.found for step in climbs["temperature"][0].steps if step.names == ("temperature",))
    assert fit == "the engine's logprobs fit temperature 0.60, the trainer's is 1"


def test_a_softcap_that_is_left_out_remains_and_is_no_rounding(climbs: dict[str, Any]) -> None:
    found, said = climbs["softcap"]
    assert abs(found.explained) < 0.05
    assert found.rest.mean_nats > 0.05
    assert "what is done with the logits" in said[0]
