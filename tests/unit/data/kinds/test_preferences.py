from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.kinds.preferences import Comparison, Pair, PreferenceSource
from rlframe.data.kinds.unpaired import UnpairedSource
from rlframe.data.records import read
from rlframe.utils.errors import DataError
from tests.unit.data.marks import marked, record, write

USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "y"), ("assistant", "n"))
)
GPT_YES = {"from": "gpt", "value": "y"}


def comparison(**fields: object) -> Comparison:
    return PreferenceSource.understand(record(**fields), DataConfig())


def stream_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict], *, max_tokens: int = 1000
) -> PreferenceSource:
    config = DataConfig(path=write(folder / "a.jsonl", rows), evaluation_count=0, shuffle=False)
    return PreferenceSource(config, tokenizer=tokenizer, seed=0, max_tokens=max_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "q", "chosen": "y", "rejected": "n"},
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"messages": [USER], "chosen": YES, "rejected": NO},
        {"instruction": "q", "input": "", "chosen": "y", "rejected": "n"},
        {"conversations": [{"from": "human", "value": "q"}], "chosen": GPT_YES, "rejected": NO},
        {"chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]},  # ultrafeedback_binarized
        {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
        {"prompt": "q", "responses": ["y", "n"], "ranks": [1, 2]},
    ],
)
def test_known_shapes_of_pairs_are_recognised(fields: dict) -> None:
    found = comparison(**fields)
    assert (found.prompt, found.responses, found.pairs) == ((USER,), ((YES,), (NO,)), ((0, 1, 0.0),))


def test_whole_conversations_stand_behind_the_system_message_of_the_record() -> None:
    system = {"role": "system", "content": "S"}
    pair = {"chosen": [USER, YES], "rejected": [USER, NO]}
    assert comparison(system="S", **pair).prompt == (system, USER)
    assert comparison(system="S", prompt="q", **pair).prompt == (system, USER)
    given = comparison(system="other", chosen=[system, USER, YES], rejected=[system, USER, NO])
    assert given.prompt == (system, USER)
    with pytest.raises(DataError, match="s:1: expected text alone, found 'images', which rlframe does not"):
        comparison(images=["x.png"], **pair)


@pytest.mark.parametrize("prompt", ["another", [USER, YES], [{"role": "user", "content": "another"}]])
def test_a_prompt_that_whole_conversations_do_not_begin_with_is_refused(prompt: object) -> None:
    with pytest.raises(DataError, match="found another beginning, 'q'; remove 'prompt', or the turns before the resp"):
        comparison(prompt=prompt, chosen=[USER, YES], rejected=[USER, NO])


def test_a_named_prompt_is_compared_with_the_beginning_of_whole_conversations() -> None:
    pair, named = {"chosen": [USER, YES], "rejected": [USER, NO]}, DataConfig(prompt_key="asked")
    assert PreferenceSource.understand(record(asked="q", prompt="another", **pair), named).prompt == (USER,)
    with pytest.raises(DataError, match="found another beginning, 'q'; remove 'asked', or the turns before the resp"):
        PreferenceSource.understand(record(asked="another", **pair), named)
    with pytest.raises(DataError, match=r"s:1: expected the field 'asked' \(data.prompt_key\), found chosen, rejected"):
        PreferenceSource.understand(record(**pair), named)


def test_whole_conversations_part_where_they_first_differ() -> None:
    more = {"role": "user", "content": "and?"}
    found = comparison(chosen=[USER, YES, more, YES], rejected=[USER, YES, more, NO, more, NO])
    assert found.prompt == (USER, YES, more)
    assert found.responses == ((YES,), (NO, more, NO))


def test_a_ranking_becomes_every_pair_that_is_not_level_with_the_difference_of_scores() -> None:
    found = comparison(prompt="q", responses=["a", "b", "c"], scores=[1.0, 3.5, 1.0])
    assert found.pairs == ((1, 0, 2.5), (1, 2, 2.5))
    assert comparison(prompt="q", responses=["a", "b", "c"], ranks=[2, 3, 1]).pairs == (
        (0, 1, 0.0),
        (2, 0, 0.0),
        (2, 1, 0.0),
    )


def test_the_margin_is_given_or_the_difference_of_the_scores() -> None:
    pair = {"prompt": "q", "chosen": "y", "rejected": "n"}
    assert comparison(**pair, margin=2).pairs == ((0, 1, 2.0),)
    assert comparison(**pair, score_chosen=8.5, score_rejected=6.0).pairs == ((0, 1, 2.5),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": "q", "chosen": "y"},
            "expected 'chosen' and 'rejected', .*no 'rejected' among the fields prompt, c",
        ),
        ({"chosen": "y", "rejected": "n"}, "expected the prompt in one of the fields messages, .*data.prompt_key"),
        ({"prompt": "q", "chosen": 5, "rejected": "n"}, "expected 'chosen' to be text, a message or a list .* int 5"),
        (
            {"chosen": [USER, YES, USER, YES], "rejected": [USER, YES, YES, NO]},
            ".*that turn 2 is from 'user' in one and 'assistant' in the other",
        ),
        ({"messages": [USER, YES], "chosen": "y", "rejected": "n"}, "expected a prompt that ends with the user"),
        ({"prompt": "q", "chosen": "y", "rejected": "n", "margin": -1}, "expected 'margin' to be at least 0"),
        (
            {"prompt": "q", "chosen": "y", "rejected": "n", "margin": "big"},
            "expected 'margin' to be a number, found 'b",
        ),
        (
            {"prompt": "q", "chosen": "y", "rejected": "n", "score_chosen": 1, "score_rejected": 2},
            "expected 'score_chosen' - 'score_rejected' to be at least 0",
        ),
        (
            {"chosen": [USER, {**YES, "loss_scale": [0.5]}], "rejected": [USER, NO]},
            r"expected no weight on a message of 'chosen', which counts as a whole, found \[0.5\]; remove it",
        ),
        (
            {"prompt": "q", "chosen": "y", "rejected": {**NO, "train_detail": [{"begin_offset": 0}]}},
            "expected no weight on a message of 'rejected'",
        ),
        (
            {"prompt": "q", "chosen": "y", "rejected": "n", "weight": 0.5},
            "expected no weight of a whole record, which rlframe does not read, found the field 'weight' 0.5",
        ),
        ({"prompt": "q", "responses": ["y"], "ranks": [1]}, "expected 'responses' to list at least 2"),
        ({"prompt": "q", "responses": ["y", "n"]}, r"expected 'scores' \(highest best\) or 'ranks'"),
        ({"prompt": "q", "responses": ["y", "n"], "ranks": [1]}, "expected 'ranks' to be a list of 2 numbers"),
        ({"prompt": "q", "responses": ["y", "n"], "scores": [1, None]}, r"expected 'scores\[1\]' to be a number"),
        ({"prompt": "q", "responses": ["y", [USER]], "scores": [1, 2]}, "expected each of .* to begin with the assist"),
    ],
)
def test_a_record_that_makes_no_pair_is_named_with_the_field(fields: dict, message: str) -> None:
    with pytest.raises(DataError, match="s:1: " + message):
        comparison(**fields)


def test_only_the_response_and_the_token_that_ends_it_are_learnt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [
        {"id": "one", "messages": [USER, YES, USER], "chosen": "ok", "rejected": "no", "margin": 0.5},
        {"id": "two", "prompt": "q", "chosen": "y", "rejected": "n"},
    ]
    stream = stream_of(tmp_path, tokenizer, rows)
    pairs: list[Pair] = stream.next(2)
    # The assistant's earlier turn is part of the prompt: not learnt.
    prompt = "<user>q<end>\n<assistant>y<end>\n<user>q<end>\n<assistant>"
    assert [marked(part, tokenizer) for part in pairs[0].parts] == [prompt + "[o][k][<end>]", prompt + "[n][o][<end>]"]
    batch = stream.batch(pairs)
    # one: 5 + 5 + 5 tokens of prompt (user q end newline, assistant y end newline, user q end newline assistant), + 3
    assert batch.lengths.tolist() == [16, 16, 7, 7]
    assert batch.pair.tolist() == [0, 0, 1, 1] and batch.units().tolist() == [0, 0, 1, 1]
    assert batch.chosen.tolist() == [True, False, True, False]
    assert batch.margin.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert batch.loss_mask.sum() == 3 + 3 + 2 + 2
    assert torch.equal(batch.select([2, 3]).token_ids, batch.token_ids[32:])


def test_pairs_that_say_nothing_or_are_too_long_are_dropped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [
        {"prompt": "q", "chosen": "y", "rejected": "n"},  # 7 + 7 tokens
        {"prompt": "q", "chosen": "y", "rejected": "nn"},  # 7 + 8
        {"prompt": "q", "chosen": "y", "rejected": "y"},
        {"chosen": [USER, YES], "rejected": [USER, YES], "id": "again"},
        {"prompt": "q", "responses": ["y", "n"], "scores": [1, 1]},
    ]
    stream = stream_of(tmp_path, tokenizer, rows, max_tokens=14)
    assert len(stream) == 1
    assert stream.dropped == {
        "pair is too long": 1,
        "chosen equals rejected": 2,
        "no response is preferred to another": 1,
    }
    with pytest.raises(DataError, match="items of at most 13 tokens .*one pair each, found none; the shortest has 14"):
        stream_of(tmp_path, tokenizer, rows, max_tokens=13)


def test_each_text_of_a_pair_must_fit_the_models_positions(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "q", "chosen": "y", "rejected": "n"}, {"prompt": "q", "chosen": "y", "rejected": "nn"}]
    path = write(tmp_path / "a.jsonl", rows)
    config = DataConfig(path=path, evaluation_count=0, cache_folder=str(tmp_path / "cache"))

    def stream(positions: int) -> PreferenceSource:
        return PreferenceSource(config, tokenizer=tokenizer, seed=0, max_tokens=100, max_positions=positions)

    # 7 + 7 and 7 + 8 tokens. The second stream must not get the items of the first from the cache.
    assert len(stream(8)) == 2
    found = stream(7)
    assert len(found) == 1 and found.dropped == {"pair has more tokens than the model has positions": 1}
    with pytest.raises(DataError, match="within the model's 6 positions .*found none; the shortest has 14"):
        stream(6)


def test_the_pairs_of_a_ranking_are_dealt_once_each_and_held_out_together(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"id": str(i), "prompt": f"q{i}", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]} for i in range(20)]
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows))
    stream = PreferenceSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
    dealt = [pair.id for pair in stream.next(len(stream))]
    assert len(set(dealt)) == len(stream) == 18 * 3
    held_out = {pair.id.partition("#")[0] for pair in stream.held_out()}
    assert len(stream.held_out()) == 6 and len(held_out) == 2
    assert not held_out & {identity.partition("#")[0] for identity in dealt}


def test_the_preference_demo_becomes_pairs(shared_data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = DataConfig(path=str(shared_data / "llamafactory" / "dpo_en_demo.json"))
    stream = PreferenceSource(config, tokenizer=tokenizer, seed=0, max_tokens=100_000)
    # Some records stand there twice.
    assert len(stream.held_out()) == 29 and set(stream.dropped) == {"duplicate id"}
    assert len(stream) + 29 + stream.dropped.total() == 300
    for pair in stream.next(len(stream)):
        chosen, rejected = pair.parts
        start = int(chosen.weights.argmax())
        assert start > 0 and start == int(rejected.weights.argmax())
        assert (chosen.token_ids[:start] == rejected.token_ids[:start]).all()
        assert chosen.weights[start:].all() and rejected.weights[start:].all()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, YES, USER, NO], "label": False},
        {"prompt": [USER, YES, USER], "completion": "n", "label": False},
        {"prompt": [USER, YES, USER], "completion": [NO], "label": False},
        {"instruction": "q", "output": "n", "history": [["q", "y"]], "kto_tag": False},
    ],
)
def test_a_judged_response_is_learnt_in_its_last_turn(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, fields: dict
) -> None:
    other = {"prompt": "q", "response": "y", "label": True, "id": "z"}
    config = DataConfig(path=write(tmp_path / "a.jsonl", [fields, other]), evaluation_count=0, shuffle=False)
    stream = UnpairedSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
    items = stream.next(2)
    expected = "<user>q<end>\n<assistant>y<end>\n<user>q<end>\n<assistant>[n][<end>]"
    assert marked(items[0].parts[0], tokenizer) == expected
    batch = stream.batch(items)
    assert batch.desirable.tolist() == [False, True] and batch.kl_nats.tolist() == [0.0, 0.0]
    assert batch.units().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": "q", "completion": "y"},
            "expected 'label' or 'kto_tag', true for .*found the fields prompt, compl",
        ),
        ({"prompt": "q", "completion": "y", "label": "good"}, "expected 'label' to be true or false, found 'good'"),
        *(
            (
                {"prompt": [USER], name: [YES, USER, NO], "label": True},
                f"expected '{name}' to be one message, .*found 3; put the messages before it into the prompt",
            )
            for name in ("completion", "response")
        ),
        ({"prompt": "q", "label": True}, "expected the last message from the assistant, found 'user'"),
    ],
)
def test_a_record_without_a_verdict_is_named(fields: dict, message: str) -> None:
    with pytest.raises(DataError, match="s:1: " + message):
        UnpairedSource.understand(record(**fields), DataConfig())


def test_the_kto_demo_becomes_verdicts(shared_data: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = shared_data / "llamafactory" / "kto_en_demo.json"
    stream = UnpairedSource(DataConfig(path=str(path)), tokenizer=tokenizer, seed=0, max_tokens=100_000)
    items = stream.next(len(stream)) + stream.held_out()
    verdicts = {item.id: item.desirable for item in items}
    expected = {entry.id: entry.fields["label"] for entry in read(str(path), max_bytes=1e9) if entry.id in verdicts}
    assert verdicts == expected and 290 < len(items) == 300 - stream.dropped.total()
