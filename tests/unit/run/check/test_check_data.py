"""Settings of the data that the algorithm's kind of data does not look at."""

import re
from typing import Any

import pytest

from rlframe.algorithms.base import Algorithm
from rlframe.algorithms.classification import ClassificationConfig
from rlframe.algorithms.dpo import Dpo, DpoConfig, ReferenceSource
from rlframe.algorithms.gkd import Gkd, GkdConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.reranker import RerankerConfig, RerankerLoss
from rlframe.algorithms.sft import Imitated, Sft, SftConfig
from rlframe.data.config import DataConfig
from rlframe.data.kinds import find_source
from rlframe.data.prompts import PromptSource
from rlframe.data.records import Record
from rlframe.data.text.conversations import understand
from rlframe.run.check.data import OF_SOME_KINDS, OFFLINE, nothing_to_judge, setting_faults
from rlframe.utils.registry import names

SFT = Sft(SftConfig())
PRETRAINING = Sft(SftConfig(data=Imitated.TEXTS))
GRPO = Grpo(GrpoConfig())
PRECOMPUTED = Dpo(DpoConfig(reference=ReferenceSource.PRECOMPUTED))
GKD, SEQ_KD = Gkd(GkdConfig()), Gkd(GkdConfig(seq_kd=True))


@pytest.mark.parametrize(
    ("algorithm", "settings", "faults"),
    [
        (SFT, {"system_prompt": "S", "last_turn_only": True, "answer_key": "a", "prompt_key": "p"}, []),
        (SFT, {"labels": ["a", "b"]}, ["data.labels has no effect with algorithm.name=x, which trains on examples"]),
        (SFT, {"max_prompt_tokens": 7}, ["data.max_prompt_tokens has no effect .* examples, got 7; remove it"]),
        (PRETRAINING, {"text_layout": "separate", "prompt_key": "p"}, []),
        (PRETRAINING, {"last_turn_only": True}, ["data.last_turn_only has no effect .*on texts, got true; remove it"]),
        (GRPO, {"max_prompt_tokens": 7, "system_prompt": "S"}, []),
        (GRPO, {"chat_template_kwargs": {"brief": True}}, []),
        (
            PRETRAINING,
            {"chat_template_kwargs": {"brief": True}},
            ["data.chat_template_kwargs has no effect .*on texts"],
        ),
        (SFT, {"cache_folder": None}, []),
        # The prompts are the engine's and the responses the data's, in turns; or the teacher writes them.
        (GKD, {"max_prompt_tokens": 7, "last_turn_only": True}, []),
        (SEQ_KD, {"max_prompt_tokens": 7}, []),
        (SEQ_KD, {"last_turn_only": True}, ["data.last_turn_only has no effect with algorithm.name=x, got true"]),
        (GRPO, {"cache_folder": None}, []),
        (SFT, {"streaming": True, "shuffle_buffer": 5}, []),
        (GRPO, {"streaming": True, "shuffle_buffer": 5}, []),
        (
            GKD,
            {"streaming": True},
            ["data.streaming must be false with algorithm.name=x, with these settings, got true"],
        ),
        (PRECOMPUTED, {"streaming": True}, ["algorithm.reference must be live with data.streaming=true"]),
        (PRECOMPUTED, {}, []),
        (GRPO, {"text_layout": "separate"}, ["data.text_layout has no effect with algorithm.name=x, got separate"]),
    ],
)
def test_a_setting_without_effect_is_refused(algorithm: Algorithm, settings: dict[str, Any], faults: list[str]) -> None:
    found = list(map(str, setting_faults(DataConfig(**settings), algorithm, name="x")))
    assert len(found) == len(faults)
    for fault, pattern in zip(found, faults, strict=True):
        assert re.match(pattern, fault), fault


def test_data_without_an_answer_is_refused_for_a_reward_that_needs_one() -> None:
    rows = [Record(fields={"prompt": text, **more}, source="s", where="s:1") for text, more in (("a", {}), ("b", {}))]
    readings = [understand(row, DataConfig()) for row in rows]
    (fault,) = map(str, nothing_to_judge(readings, ["match"], what="s"))
    assert fault.startswith("data.answer_key must name the field with the answer, which reward.parts.match compares")
    assert list(nothing_to_judge(readings, [], what="s")) == []
    answered = understand(Record(fields={"prompt": "c", "answer": "1"}, source="s", where="s:3"), DataConfig())
    assert list(nothing_to_judge([*readings, answered], ["match"], what="s")) == []


def test_labels_that_are_all_the_same_are_refused() -> None:
    def labelled(*labels: str) -> list[Any]:
        rows = [Record(fields={"text": "a", "label": label}, source="s", where="s:1") for label in labels]
        return [find_source("labelled").understand(row, DataConfig()) for row in rows]

    (fault,) = map(str, nothing_to_judge(labelled("x", "x"), [], what="s"))
    assert fault == "data.path=s has the label 'x' on every record: there is nothing to distinguish"
    assert list(nothing_to_judge(labelled("x", "y"), [], what="s")) == []


@pytest.mark.parametrize(
    ("labels", "names", "fault"),
    [
        (["x", "y", "z"], None, "algorithm.num_classes must be at least 3, got 2: s has the classes x, y, z"),
        (["x", "z"], ["x", "y", "z"], "algorithm.num_classes must be at least 3, got 2: s has the classes x, y, z"),
        ([0, 4, 1], None, "algorithm.num_classes must be at least 5, got 2: s has the label 4"),
        ([0, 0.5], None, "data.path must have whole numbers from 0 as labels, or names, got 0.5 in s"),
        ([0, -1], None, "data.path must have whole numbers from 0 as labels, or names, got -1 in s"),
        ([True, False], None, None),
        (["y", "x"], ["x", "y", "z"], None),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: list[Any], names: list[str] | None, fault: str | None) -> None:
    rows = [Record(fields={"text": "a", "label": label}, source="s", where="s:1") for label in labels]
    readings = [find_source("labelled").understand(row, DataConfig(labels=names)) for row in rows]
    found = [
        str(each) for each in nothing_to_judge(readings, [], what="s", settings=ClassificationConfig(), names=names)
    ]
    assert found == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("labels", "loss", "fault"),
    [
        (
            [0, 3, 1],
            "pointwise",
            "must have labels from 0 to 1, got 3 in s: algorithm.loss=pointwise; or use",
        ),
        ([0, 3, 1], "listwise", None),
        ([0, -1], "listwise", "must have labels from 0 on, got -1 in s: algorithm.loss=listwise"),
        ([0, 0.5, 1], "pointwise", None),
    ],
)
def test_labels_that_a_rerankers_loss_does_not_know_are_refused(
    labels: list[float], loss: str, fault: str | None
) -> None:
    fields = {"query": "q", "documents": [*"abc"][: len(labels)], "labels": labels}
    readings = [find_source("labelled").understand(Record(fields=fields, source="s", where="s:1"), DataConfig())]
    settings = RerankerConfig(loss=RerankerLoss(loss))
    found = [str(each) for each in nothing_to_judge(readings, [], what="s", settings=settings)]
    assert len(found) == bool(fault) and all(each.startswith(f"data.path {fault}") for each in found)


def test_each_setting_of_some_kinds_is_looked_at_by_one() -> None:
    kinds = [find_source(name).settings for name in names("rlframe.data.kinds")]
    assert OFFLINE.union(PromptSource.settings, *kinds) == set(OF_SOME_KINDS)
