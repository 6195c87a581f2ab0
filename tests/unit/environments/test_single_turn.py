from rlframe.environments.single_turn import SingleTurn, SingleTurnConfig
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Rollout
from rlframe.utils import registry


def test_an_attempt_is_over_after_one_response() -> None:
    rollout = Rollout(
        prompt=Prompt(id="0", text="p", input=ModelInput((1,))),
        sample_index=0,
        input=ModelInput([1, 2]),
        loss_mask=[False, True],
        rollout_logprobs=[0.0, -0.1],
        versions=[-1, 0],
        finish_reason=FinishReason.STOP,
    )
    assert SingleTurn(SingleTurnConfig()).respond(rollout) is None


def test_it_is_found_by_its_file_name() -> None:
    assert registry.find("rlframe.environments", "single_turn", key="environment") == (SingleTurn, SingleTurnConfig)
