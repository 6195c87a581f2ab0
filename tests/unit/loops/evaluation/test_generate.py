"""mode=generate: responses are written once for each prompt, however often it is interrupted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlframe.loops.evaluation.generate import Generation
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Rollout, SamplingParams
from rlframe.utils.errors import OutputError
from tests.local_attempts import LocalAttempts, answering

PROMPTS = [Prompt(id=f"p{index}", text=f"text {index}", input=ModelInput((index,))) for index in range(6)]
IDS = [prompt.id for prompt in PROMPTS]


def generation(file: Path) -> tuple[Generation, list[int]]:
    """A generation with an engine that repeats the prompt, and what it was asked."""
    asked: list[int] = []

    def answer(request: GenerationRequest) -> Completion:
        asked.append(int(request.input.token_ids[0]))
        return Completion(
            token_ids=request.input.token_ids, logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP
        )

    def score(rollout: Rollout) -> None:
        rollout.reward, rollout.reward_parts = 1.0, {"match": 1.0}

    attempts = LocalAttempts([answering(answer)], score)
    made = Generation(
        attempts=attempts,
        scorer=None,
        file=file,
        sampling=SamplingParams(max_tokens=4),
        samples_per_prompt=2,
        progress=False,
    )
    return made, asked


def written(file: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == len({each["id"] for each in records})
    return {each["id"]: each for each in records}


def test_every_prompt_gets_a_line_with_its_responses(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    made, asked = generation(file)
    made.run(PROMPTS, IDS)
    assert written(file).keys() == set(IDS) and made.num_written == 6 and len(asked) == 12
    assert written(file)["p3"] == {
        "id": "p3",
        "prompt": "text 3",
        "prompt_tokens": 1,
        "responses": [
            {"text": "[3]", "tokens": 1, "finish_reason": "stop", "reward": 1.0, "reward_parts": {"match": 1.0}}
        ]
        * 2,
        "lost": 0,
    }


def test_what_is_finished_is_not_sampled_again_and_a_torn_line_is(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    made, _ = generation(file)
    made.run(PROMPTS[:4], IDS[:4])
    whole = file.read_bytes()
    torn = json.loads(whole.splitlines()[-1])["id"]
    file.write_bytes(whole[:-5])
    again, asked = generation(file)
    again.run(PROMPTS, IDS)
    assert written(file).keys() == set(IDS) and again.num_written == 3
    assert sorted(set(asked)) == sorted({4, 5, int(torn[1:])})
    done, asked = generation(file)
    done.run(PROMPTS, IDS)
    assert asked == [] and done.num_written == 0


def test_failed_rewards_and_lost_attempts_are_told_those_of_before_an_interruption_too(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    made, _ = generation(file)
    made.run(PROMPTS, IDS)
    assert made.faults() == ""
    records = written(file)
    records["p1"]["responses"][0]["reward_failed"] = True
    file.write_text("".join(json.dumps(each) + "\n" for each in records.values()))
    again, asked = generation(file)
    again.run(PROMPTS, IDS)
    assert asked == [] and again.faults() == "a reward failed on 1 responses, where it counts as 0"
    records["p2"] |= {"responses": [], "lost": 2}
    file.write_text("".join(json.dumps(each) + "\n" for each in records.values()))
    assert again.faults() == "a reward failed on 1 responses, where it counts as 0, and 2 attempts were lost"


def test_responses_to_another_prompt_with_the_same_id_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    generation(file)[0].run(PROMPTS, IDS)
    talk = ({"role": "user", "content": "text 1"},)
    for changed in (replace(PROMPTS[1], text="another"), replace(PROMPTS[1], messages=talk)):
        made, asked = generation(file)
        with pytest.raises(OutputError, match="another prompt with the id 'p1', because the data has changed"):
            made.run([PROMPTS[0], changed], IDS[:2])
        assert asked == []


def test_a_line_that_is_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text('{"id": "p0"}\nnotes\n{"id": "p1"}\n')
    made, _ = generation(file)
    with pytest.raises(OutputError, match="line 2 is not an object with 'id'; move the file away"):
        made.run(PROMPTS, IDS)
    assert "notes" in file.read_text()


def test_prompts_in_any_number_are_begun_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.loops.evaluation.generate.MOST_OPEN", 5)
    made, _ = generation(tmp_path / "responses.jsonl")
    made.run(PROMPTS, IDS)
    assert len(made.attempts.asked[0][0]) == 2, "four attempts"
    assert written(tmp_path / "responses.jsonl").keys() == set(IDS)
