"""Faults in the walk over data and in what records mean."""

from tests.mutations.mutation import Mutation, faults

PROMPTS = "tests/unit/data/test_prompts.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/data/ordered.py",
        "tests/unit/data/test_curriculum.py",
        ("prompts are passed over twice in a row", "self._passed = unwanted - self._passed", "self._passed = unwanted"),
        (
            "an epoch changes its order",
            "self._ranked = list(self._rates)\n        low",
            "self._ranked = self._rates\n        low",
        ),
        ("a resumed epoch passes nobody over", 'set(state["passed"])', "set()"),
        ("a resumed epoch has another order", 'list(state["ranked"])', 'list(state["rates"])'),
        ("a stage begins late", "first <= max(step, 1) for", "first < max(step, 1) or first == 1 for"),
        ("true is a number", "if isinstance(value, bool) or not isinstance(", "if not isinstance("),
    ),
    *faults(
        "rlframe/data/cursor.py",
        "tests/unit/data/test_curriculum.py",
        ("other numbers go on with the position", "        if numbers is not None:\n", "        if False:\n"),
    ),
    *faults(
        "rlframe/data/prompts.py",
        PROMPTS,
        (
            "streamed prompts are held out and trained on",
            "if conversation.prompt_text in self._held_out_texts:",
            "if False:",
        ),
        ("streamed prompts are repeated", "            elif conversation.id in kept:\n", "            elif False:\n"),
    ),
    *faults(
        "rlframe/attempts/account/leases.py",
        "tests/unit/data/test_curriculum.py",
        ("a lease that is passed over has no end", "self.ledger.dropped(ordinal, DropReason.PASSED_OVER, [])", "pass"),
        ("who is passed over is attempted", "                continue\n", "                pass\n"),
    ),
    *faults(
        "rlframe/data/cursor.py",
        PROMPTS,
        ("the order is the same in each epoch", 'prefix = f"{seed}:{epoch}:"', 'prefix = f"{seed}:"'),
        ("the order is the same for each seed", 'prefix = f"{seed}:{epoch}:"', 'prefix = f"{epoch}:"'),
        ("an epoch begins where the last one stood", "self._epoch, self._position = epoch, 0", "self._epoch = epoch"),
        ("a resumed walk begins its epoch again", 'self._position = state["position"]', "self._position = 0"),
        ("a resumed walk is in another epoch", 'self._epoch = state["epoch"]', "self._epoch = 0"),
        ("another data set is taken", "if state.get(key) != mine[key]:", "if False:"),
        ("one prompt of each call is skipped", "self._position += len(taken)", "self._position += len(taken) + 1"),
        ("the fingerprint knows no tokens", "digest.update(tokens_of_item.tobytes())", "pass"),
    ),
    *faults(
        "rlframe/data/cursor.py",
        "tests/unit/data/test_mixing.py",
        (
            "a mixture's shares are equal",
            "[weight / sum(weights) for weight in weights]",
            "[1 / len(weights) for weight in weights]",
        ),
        (
            "a resumed mixture forgets what it dealt",
            'self._dealt = list(state["dealt"])',
            "self._dealt = [0] * len(self._dealt)",
        ),
        ("the mixture deals from the one that is ahead", "behind.index(max(behind))", "behind.index(min(behind))"),
    ),
    *faults(
        "rlframe/data/prompts.py",
        PROMPTS,
        (
            "prompts that are too long stay",
            "kept = [place for place, length in enumerate(lengths) if length <= config.max_prompt_tokens]",
            "kept = list(range(len(lengths)))",
        ),
        ("what is dropped is not counted", 'self.dropped["prompt is too long"] += too_long', "pass"),
    ),
    *faults(
        "rlframe/data/storage/tables.py",
        "tests/unit/data/test_tables.py",
        ("another file's records are used", 'digest.update(file.name.encode() + b"\\0" + digest_of(file))', "pass"),
        ("damaged records are used", "if digest_of(file).hex() == file.name", "if True or file.name"),
        ("what JSON cannot say is kept", "if folder and not others:", "if folder:"),
        ("records of Parquet go through JSON", 'if not record.source.endswith(".parquet") or', "if True or"),
    ),
    *faults(
        "rlframe/data/sources.py",
        "tests/unit/data/test_prompts.py tests/unit/data/test_mixing.py",
        ("prompts that are held out stay", "lambda _, prompt: prompt not in prompts", "lambda _, prompt: True"),
        (
            "a subset is the first records",
            "sorted(order_by_hash(part.ids, salt=salt)[: entry.count])",
            "range(entry.count)",
        ),
        ("repeated prompts cost more than a tenth", "if sizes[prompt] > left:", "if False:"),
    ),
    *faults(
        "rlframe/data/text/conversations.py",
        PROMPTS + " tests/unit/data/kinds/test_examples.py",
        (
            "the answer keeps its commas",
            'return match[1].replace(",", "") if match else text',
            "return match[1] if match else text",
        ),
        ("the worked solution is the answer", 'return match[1].replace(",", "") if match else text', "return text"),
        (
            "the answer is part of the prompt",
            'len(messages) - (messages[-1]["role"] == "assistant")',
            "len(messages)",
        ),
        ("message weights are 1", "weights[index] = float(weight)", "weights[index] = 1.0"),
        (
            "a weight has no effect where the last turn alone is learned",
            "float(index >= first) if own is None else own",
            "float(index >= first) * (1.0 if own is None else own)",
        ),
    ),
    *faults(
        "rlframe/data/text/conversations.py",
        "tests/unit/data/test_records.py",
        ("a prompt is learned where the response is text", "asked=len(messages) if is_prompt else 0", "asked=0"),
    ),
]
