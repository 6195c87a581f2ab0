"""Steps that are prepared from those before, beside steps that a runner prepares anew: the same numbers in the same
buffers, and fewer calls."""

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.rollout.vllm.decode.ahead import KEY, STEPS
from rlframe.rollout.vllm.decode.steady import LEAST_REPEATS, MOST_CAPTURED, Steady, captures

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SLOTS, PAGE, PAGES = 6, 4, 20


@dataclass
class Batch:
    """As much of vLLM's InputBatch as steps read."""

    req_ids: list[str]
    num_reqs: int
    num_reqs_after_padding: int
    num_tokens: int
    num_tokens_after_padding: int
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    num_computed_tokens_np: np.ndarray
    is_prefilling_np: np.ndarray
    positions: torch.Tensor
    logits_indices: torch.Tensor
    cu_num_logits: torch.Tensor


class Tables:
    """Page tables, by slot and of a step."""

    def __init__(self) -> None:
        self.pages = torch.zeros(SLOTS, PAGES, dtype=torch.int32)
        self.input_block_tables = [torch.zeros(SLOTS, PAGES, dtype=torch.int32)]
        self.gathered = 0
        self.block_table_ptrs = object()

    def gather_block_tables(self, rows: torch.Tensor, num_reqs_padded: int) -> tuple[torch.Tensor, ...]:
        self.gathered += 1
        (table,) = self.input_block_tables
        table[: len(rows)], table[len(rows) : num_reqs_padded] = self.pages[rows.long()], 0
        return (table[:num_reqs_padded],)

    def compute_slot_mappings(
        self, rows: torch.Tensor, starts: torch.Tensor, positions: torch.Tensor, num_tokens_padded: int
    ) -> torch.Tensor:
        counts = starts.diff()[: len(rows)]
        owners, places = torch.repeat_interleave(rows, counts).long(), positions[: int(counts.sum())]
        slots = torch.full((1, num_tokens_padded), -1)
        slots[0, : len(places)] = self.pages[owners, places // PAGE] * PAGE + places % PAGE
        return slots


class Runner:
    """vLLM's runner without a model: it computes a step, and samples the step's number."""

    def __init__(self) -> None:
        self.num_speculative_steps, self.use_dcp, self.use_pp, self.pcp_manager = 0, False, False, None
        self.model_config = SimpleNamespace(rswa_window=None)
        whole: Any = {"dtype": torch.int32}
        self.req_states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=torch.zeros(SLOTS, **whole)),
            num_computed_tokens_np=np.zeros(SLOTS, dtype=np.int32),
            prefill_len=SimpleNamespace(gpu=torch.zeros(SLOTS, **whole)),
            last_sampled_tokens=torch.zeros(SLOTS, **whole),
            draft_tokens=None,
        )
        self.input_buffers = SimpleNamespace(
            positions=torch.zeros(64, **whole), seq_lens=torch.zeros(SLOTS, **whole), input_ids=torch.zeros(64, **whole)
        )
        self.starts = torch.zeros(SLOTS + 1, **whole)
        self.block_tables = Tables()
        self.model_state = SimpleNamespace(prepare_attn=self.make_metadata)
        self.prepared = self.metadata = self.step = self.sampled = 0
        # The sampler and the head of the model: a token is the step's number and the slot.
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self.sampler = SimpleNamespace(
            plain=np.array([True] * (SLOTS - 1) + [False]),
            one_pass=self,
            recorded=lambda batch, tokens, _: self.output(batch, tokens),
        )

    def prepare_inputs(self, output: Any, shape: Any) -> Batch:
        self.prepared += 1
        names, counts = list(output.num_scheduled_tokens), list(output.num_scheduled_tokens.values())
        slots = np.array([int(name) for name in names], dtype=np.int32)
        self.starts[:] = sum(counts)
        self.starts[: len(names)] = torch.tensor([0, *np.cumsum(counts)[:-1]])
        starts = self.starts[: shape + 1]
        computed, rows = self.req_states.num_computed_tokens_np[slots], torch.from_numpy(slots)
        move(rows, starts, self.req_states.num_computed_tokens.gpu, *vars(self.input_buffers).values())
        bound = np.zeros(shape, dtype=np.int32)
        bound[: len(names)] = computed + counts
        self.input_buffers.input_ids[: len(names)] = self.req_states.last_sampled_tokens[rows.long()]
        return Batch(
            req_ids=names, num_reqs=len(names), num_reqs_after_padding=shape, num_tokens=sum(counts),
            num_tokens_after_padding=max(shape, sum(counts)), idx_mapping=rows, idx_mapping_np=slots,
            query_start_loc=starts, seq_lens=self.input_buffers.seq_lens[:shape], num_computed_tokens_np=computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(bound),
            is_prefilling_np=computed < self.req_states.prefill_len.gpu.numpy()[slots],
            positions=self.input_buffers.positions, logits_indices=torch.arange(len(names)),
            cu_num_logits=torch.arange(len(names) + 1),
        )  # fmt: skip

    def prepare_attn(self, batch: Batch) -> Any:
        tables = self.block_tables.gather_block_tables(batch.idx_mapping, batch.num_reqs_after_padding)
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens_after_padding
        )
        return tables, slots

    def make_metadata(self, batch: Batch, mode: Any, tables: Any, slots: Any, groups: Any, *_: Any) -> Any:
        self.metadata += 1
        for (builder,) in groups:
            builder.get_metadata_builder(0).fill(tables[0], batch.seq_lens[: batch.num_reqs_after_padding])
        return {"layer": object()}

    def execute_model(self, output: Any, shape: int, *, groups: Any = (), dummy_run: bool = False) -> dict[str, Any]:
        """What a step reads."""
        from vllm.config import CUDAGraphMode

        if dummy_run:
            for each in (self.input_buffers.positions, self.input_buffers.seq_lens, self.starts):
                each.fill_(-7)
            return {}
        self.step += 1
        self.follow(output)
        batch: Any = self.prepare_inputs(output, shape)
        tables, slots = self.prepare_attn(batch)
        self.model_state.prepare_attn(batch, CUDAGraphMode.FULL, tables, slots, groups)
        read = {"slots": slots, "tables": tables[0], "ids": self.input_buffers.input_ids[: batch.num_reqs]}
        read |= {"positions": batch.positions[: batch.num_tokens], "lengths": batch.seq_lens}
        read |= {"rows": batch.logits_indices, "bound": batch.seq_lens_cpu_upper_bound}
        found = {name: each.tolist() for name, each in read.items()}
        found |= {"computed": batch.num_computed_tokens_np.tolist(), "names": batch.req_ids}
        self.counts = torch.tensor(list(output.num_scheduled_tokens.values()))
        result, *numbers = self.sample(torch.arange(64), batch, None)
        self.postprocess_sampled(batch.idx_mapping, result.sampled_token_ids, *numbers, batch.query_start_loc)
        return found | {"tokens": result.sampled_token_ids.tolist()}

    def sample(self, hidden: Any, batch: Batch, grammar: None) -> Any:
        self.sampled += 1
        tokens, _ = self.choose(hidden[batch.logits_indices], batch, self.choice(batch))
        # Requests that are not plain are sampled in another way.
        result = self.output(batch, tokens + 3 * torch.from_numpy(~self.sampler.plain[batch.idx_mapping_np]))
        return result, result.num_sampled, result.num_rejected

    def choice(self, batch: Batch) -> tuple[Any, bool]:
        """Changes with lengths, as tokens that may not be sampled yet."""
        return ("stops" if (batch.seq_lens_cpu_upper_bound[: batch.num_reqs] < 12).any() else None), False

    def choose(self, logits: Any, batch: Batch, choice: tuple[Any, bool]) -> tuple[Any, Any]:
        lengths = batch.seq_lens[: len(logits)]
        forbidden = 7 if choice[0] and (lengths < 12).any() else 0
        return 100 * self.step + 10 * lengths + logits + forbidden + batch.idx_mapping, torch.zeros(len(logits))

    def output(self, batch: Batch, tokens: Any) -> Any:
        ones = torch.ones(len(tokens))
        return SimpleNamespace(sampled_token_ids=tokens[:, None], num_sampled=ones, num_rejected=ones - 1)

    def postprocess_sampled(self, rows: Any, tokens: Any, *_: Any) -> None:
        self.req_states.num_computed_tokens.gpu[rows.long()] += self.counts.int()
        self.req_states.last_sampled_tokens[rows.long()] = tokens[:, 0].int()

    def follow(self, output: Any) -> None:
        """Takes new requests, pages and positions, as vLLM does before it prepares a step."""
        states = self.req_states
        for new in output.scheduled_new_reqs:
            states.num_computed_tokens.gpu[new.slot] = states.num_computed_tokens_np[new.slot] = 0
            states.prefill_len.gpu[new.slot] = new.length
            self.block_tables.pages[new.slot, : len(new.pages)] = torch.tensor(new.pages, dtype=torch.int32)
        cached = output.scheduled_cached_reqs
        for name, place, pages in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            states.num_computed_tokens_np[int(name)] = place
            if pages is not None:
                self.block_tables.pages[int(name), place // PAGE] = pages[0][0]


def move(rows: Any, starts: Any, computed: Any, positions: Any, lengths: Any, *_: Any) -> None:
    """As vLLM's kernel: positions and lengths of a step."""
    lengths.zero_()
    for row, slot in enumerate(rows.tolist()):
        begin, end = int(starts[row]), int(starts[row + 1])
        positions[begin:end] = computed[slot] + torch.arange(end - begin)
        lengths[row] = computed[slot] + end - begin


def decided(drawn: random.Random, steps: int) -> Iterator[tuple[Any, int, bool]]:
    """SchedulerOutputs of requests that come, end and are paused, the size of the step, and whether a run without
    requests is before it."""
    places: dict[str, int] = {}
    lengths: dict[str, int] = {}
    pages = 0
    for _ in range(steps):
        ended = {name for name, place in places.items() if drawn.random() < 0.01 or place > PAGE * PAGES - 2}
        for name in ended:
            del places[name]
        asked, new = [str(slot) for slot in range(SLOTS) if str(slot) not in places], []
        if asked and (not places or drawn.random() < 0.05):
            name = drawn.choice(asked)
            lengths[name], places[name] = drawn.randint(3, 9), 0
            count = lengths[name] // PAGE + 1
            new = [SimpleNamespace(slot=int(name), length=lengths[name], pages=[pages + 1 + n for n in range(count)])]
            pages += count
        paused = {name for name in places if drawn.random() < 0.02 and places[name]}
        names = [name for name in places if name not in paused]
        counts = {name: 1 if places[name] else lengths[name] for name in names}
        fresh = {str(each.slot) for each in new}
        running = [name for name in names if name not in fresh]
        taken: list[Any] = []
        for name in running:
            pages += (begins := places[name] % PAGE == 0)
            taken.append(([pages],) if begins else None)
        cached = SimpleNamespace(
            req_ids=running, num_computed_tokens=[places[name] for name in running], new_block_ids=taken
        )
        for name in names:
            places[name] += counts[name]
        if counts:
            yield SimpleNamespace(
                num_scheduled_tokens=counts, scheduled_new_reqs=new, scheduled_cached_reqs=cached,
                finished_req_ids=ended, preempted_req_ids=set(), scheduled_spec_decode_tokens={},
                has_structured_output_requests=False,
            ), SLOTS if drawn.random() < 0.97 else len(counts), drawn.random() < 0.02  # fmt: skip


class Again:
    """In the place of CUDA graphs: what is captured does nothing yet, and is run anew each time."""

    def __init__(self) -> None:
        self.captured = self.launched = 0

    def capture(self, run: Any) -> Any:
        self.captured += 1

        def replay() -> Any:
            self.launched += 1
            return run()

        return replay


def test_steps_read_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import input_batch

    from rlframe.rollout.vllm.attention import backend

    def combine(ids: Any, rows: Any, sampled: Any, *_: Any) -> torch.Tensor:
        ids[: len(rows)] = sampled[rows.long()]
        return torch.arange(len(rows))

    monkeypatch.setattr(input_batch, "prepare_pos_seq_lens", move)
    monkeypatch.setattr(input_batch, "combine_sampled_and_draft_tokens", combine)
    filled: dict[str, list[Any]] = {"own": [], "steady": [], "captured": []}
    runners: dict[str, Any] = {name: Runner() for name in filled}
    groups: dict[str, Any] = {}
    for name, calls in filled.items():

        def fill(tables: Any, lengths: Any, *, regroup: bool = True, calls: list[Any] = calls) -> None:
            assert (tables is not None) is regroup
            calls.append((lengths.tolist(), regroup))

        plan = SimpleNamespace(fill=fill)
        groups[name] = [[SimpleNamespace(get_metadata_builder=lambda _, plan=plan: plan)]]
    monkeypatch.setattr(backend, "plan_of", lambda builder, metadata=None: builder)
    graphs: Any = Again()
    Steady(runners["steady"]).install()
    Steady(runners["captured"], graphs).install()
    for output, shape, dummy in decided(random.Random(0), 600):
        found = {}
        for name, runner in runners.items():
            if dummy:
                runner.execute_model(None, 0, dummy_run=True)
            found[name] = runner.execute_model(output, shape, groups=groups[name])
        assert found["steady"] == found["captured"] == found["own"]
    own, steady, captured = runners.values()
    for name in ("steady", "captured"):
        assert [each[0] for each in filled[name]] == [each[0] for each in filled["own"]]
    assert sum(not each[1] for each in filled["steady"]) == own.metadata - steady.metadata > own.metadata // 2
    assert steady.prepared < own.prepared // 2 and steady.block_tables.gathered < own.block_tables.gathered
    # A run of steps that repeat is captured once, and its end again where the choice changes or a request is not plain.
    assert (captured.prepared, captured.metadata) == (steady.prepared, steady.metadata)
    assert graphs.launched > 2 * graphs.captured > 0
    assert steady.sampled == own.sampled > captured.sampled > own.sampled - graphs.launched


def test_steps_of_many_requests_are_not_captured() -> None:
    steady = Steady(Runner(), graphs := Again())  # pyright: ignore[reportArgumentType]
    steady._times, steady._metadata = LEAST_REPEATS, object()
    for count, captured in ((MOST_CAPTURED, True), (MOST_CAPTURED + 1, False)):
        steady._batch = SimpleNamespace(num_reqs=count)
        assert steady._may_capture() is captured
    assert not graphs.captured


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({}, True),
        ({"lora_config": 1}, False),
        ({"world_size": 2}, False),
        ({"device": "cpu"}, False),
        ({"sampler": 1}, False),
    ],
)
def test_runners_whose_steps_are_captured(change: dict[str, Any], known: bool) -> None:
    own = {"lora_config": None, "world_size": 1, "device": "cuda", "sampler": SimpleNamespace(one_pass=1)} | change
    config = SimpleNamespace(
        lora_config=own["lora_config"], parallel_config=SimpleNamespace(world_size=own["world_size"])
    )
    runner = SimpleNamespace(vllm_config=config, device=torch.device(own["device"]), sampler=own["sampler"])
    assert captures(runner) is known


@pytest.mark.parametrize(
    ("release", "entries", "own", "known"),
    [
        ("0.26.0", {KEY: STEPS}, {}, True),
        ("0.26.0", {}, {}, False),
        ("0.27.0", {KEY: STEPS}, {}, False),
        ("0.26.0", {KEY: STEPS}, {"num_speculative_steps": 2}, False),
        ("0.26.0", {KEY: STEPS}, {"use_pp": True}, False),
    ],
)
def test_runners_whose_steps_are_prepared(
    monkeypatch: pytest.MonkeyPatch, release: str, entries: dict[str, int], own: dict[str, Any], known: bool
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", release)
    runner: Any = Runner()
    runner.vllm_config = SimpleNamespace(additional_config=entries)
    vars(runner).update(own)
    assert Steady.knows(runner) is known
