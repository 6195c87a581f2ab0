import asyncio

from rlframe.environments.base import Turn, answers
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.single_turn import SingleTurn, SingleTurnConfig
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason
from rlframe.utils import registry


def test_an_attempt_is_over_after_one_response() -> None:
    prompt = Prompt(id="0", messages=({"role": "user", "content": "p"},), text="p", input=ModelInput((1,)))
    turn = Turn(message={"role": "assistant", "content": "r"}, text="r", finish_reason=FinishReason.STOP)
    session = SingleTurn(SingleTurnConfig())
    assert asyncio.run(session.reset(prompt, seed=0)) == prompt.messages
    assert asyncio.run(session.step(turn)).is_over
    assert not answers(EnvironmentConfig()) and answers(EnvironmentConfig(name="tools"))


def test_it_is_found_by_its_file_name() -> None:
    assert registry.find("rlframe.environments", "single_turn", key="environment") == (SingleTurn, SingleTurnConfig)
