"""The text of sampled tokens, in which only special tokens that were sampled read like special tokens."""

from collections.abc import Collection, Sequence

from rlframe.data.text.special_tokens import Rendering, marked, marks_for, special_tokens
from rlframe.types.tokenizer import PreTrainedTokenizerBase

WHERE = "a sampled turn"


def text_of(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Rendering:
    """Returns the text of tokens, special tokens included. What was spelled like one in other tokens has a mark."""
    special = {number: token for token, number in special_tokens(tokenizer).items()}
    whole = decode(token_ids, tokenizer)
    sampled = [special[one] for one in token_ids if one in special]
    if all(whole.count(token) == sampled.count(token) for token in set(special.values())):
        return Rendering(marked=whole, where=WHERE)
    pieces: list[str] = []
    runs: list[list[int]] = [[]]
    for one in token_ids:
        if one in special:
            runs += [[one], []]
        else:
            runs[-1].append(one)
    texts = [decode(run, tokenizer) for run in runs]
    marks = marks_for(texts[::2], tokenizer)
    for index, text in enumerate(texts):
        pieces.append(text if index % 2 or not marks else marked(text, marks))
    return Rendering(marked="".join(pieces), where=WHERE, marks={mark: token for token, mark in marks.items()})


def without_end(token_ids: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """Returns the tokens without the last one, if it is one of `ends`."""
    return token_ids[:-1] if len(token_ids) and token_ids[-1] in ends else token_ids


def decode(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of tokens, exactly."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
