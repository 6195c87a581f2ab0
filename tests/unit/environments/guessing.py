"""A task set and a tool of the package verifiers: a number is to be said, which the tool knows."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessState(vf.State):
    looks: int = 0


class Oracle(vf.Toolset[vf.ToolsetConfig, GuessState]):
    async def setup_task(self, task: GuessData) -> None:
        self.number = task.number

    @vf.tool
    async def look(self, what: str) -> str:
        """Says the number."""
        self.state.looks += 1
        if what != "number":
            raise ValueError(f"there is no {what}")
        return f"the number is {self.number}"


class GuessTaskConfig(vf.TaskConfig):
    tools: bool = False
    oracle: vf.ToolsetConfig = vf.ToolsetConfig()


class GuessTask(vf.Task[GuessData, GuessState, GuessTaskConfig]):
    @classmethod
    def toolsets(cls, config: GuessTaskConfig) -> list[vf.Toolset]:
        return [Oracle(config.oracle)] if config.tools else []

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.number))

    @vf.metric
    async def looks(self, trace: vf.Trace) -> float:
        return float(trace.state.looks)

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"


class GuessConfig(vf.TasksetConfig):
    task: GuessTaskConfig = GuessTaskConfig()
    count: int = 20
    endless: bool = False


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    """Numbers in their order."""

    def __init__(self, config: GuessConfig):
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self):
        number = 0
        while self.config.endless or number < self.config.count:
            data = GuessData(prompt="Guess.", system_prompt="Numbers only.", number=number, name=f"number {number}")
            yield GuessTask(data, self.config.task)
            number += 1


__all__ = ["GuessTaskset"]

if __name__ == "__main__":
    Oracle.run()
