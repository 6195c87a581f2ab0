"""Generation: responses to all prompts of a dataset, written as they are finished."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from rlframe.attempts.fleet import Attempts
from rlframe.attempts.turns import Task
from rlframe.loops.evaluation.evaluate import MOST_OPEN
from rlframe.loops.reporting.responses import ASKED, asked_of, record_of
from rlframe.loops.sampling.scoring import Scorer, score_attempts
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, SamplingParams
from rlframe.utils.errors import OutputError
from rlframe.utils.files.jsonl import append, keep_whole
from rlframe.utils.text import json_line


@dataclass(kw_only=True)
class Generation:
    """Writes responses to prompts. Prompts that the file has already are left out, so that it goes on where it was
    interrupted."""

    attempts: Attempts
    scorer: Scorer | None
    """Scores what the reward functions do not. None if there is none."""
    file: Path
    sampling: SamplingParams
    samples_per_prompt: int
    progress: bool
    """Whether to show a progress bar."""
    num_written: int = field(default=0, init=False)
    """Number of prompts that this process has written."""

    def run(self, prompts: Sequence[Prompt], ids: Sequence[str]) -> None:
        """Writes responses to all prompts that the file does not have yet, in the order in which they are finished.

        Args:
            ids: the id of each prompt.

        Raises:
            OutputError: the file has responses to another prompt with one of the ids.
        """
        done = keep_whole(self.file, "id", ASKED)
        for name, prompt in zip(ids, prompts, strict=True):
            if name in done and done[name] != json.loads(json_line(asked_of(prompt))):
                raise OutputError(
                    f"{self.file} has responses to another prompt with the id {name!r:.80}, because the data has "
                    "changed since: move the file away to begin anew, or give changed records other ids"
                )
        left = [place for place, name in enumerate(ids) if name not in done]
        tasks = (self._task(place, prompts[place]) for place in left)
        bar = tqdm(
            total=len(ids), initial=len(ids) - len(left), unit="prompt", disable=not self.progress, dynamic_ncols=True
        )
        with bar:
            for groups in self.attempts.stream(tasks, most_open=max(1, MOST_OPEN // self.samples_per_prompt)):
                self._write(groups)
                bar.update(len(groups))

    def faults(self) -> str:
        """Returns on how many responses of the file a reward failed, and how many attempts were lost. Empty if none."""
        failed = lost = 0
        with self.file.open("rb") as lines:
            for record in map(json.loads, lines):
                failed += sum(each.get("reward_failed", False) for each in record.get("responses", ()))
                lost += record.get("lost", 0)
        told = [f"a reward failed on {failed} responses, where it counts as 0"] if failed else []
        return ", and ".join([*told, f"{lost} attempts were lost"] if lost else told)

    def _task(self, place: int, prompt: Prompt) -> Task:
        return self.attempts.task(
            Group.begin(f"{place}", prompt, self.samples_per_prompt), step=0, sampling=self.sampling
        )

    def _write(self, groups: Sequence[Group]) -> None:
        if self.scorer:
            score_attempts(self.scorer, groups)
        append(self.file, *(record_of(group, num_attempts=self.samples_per_prompt) for group in groups))
        self.num_written += len(groups)
