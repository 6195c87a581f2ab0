"""A task set of the package verifiers with an environment of its own, which says whether a guess is too low."""

import verifiers.v1 as vf


class HintData(vf.TaskData):
    number: int


class HintTask(vf.Task[HintData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "what?":
            raise ValueError("nobody knows")
        return float(trace.last_reply == str(self.data.number))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))

    @vf.intercept
    async def louder(self, response: vf.Response) -> vf.Response | None:
        if response.message.content != "1":
            return None
        message = response.message.model_copy(update={"content": "2"})
        return response.model_copy(update={"message": message})


class HintConfig(vf.TasksetConfig):
    numbers: list[int] = [7]


class HintTaskset(vf.Taskset[HintTask, HintConfig]):
    """Numbers that the settings name."""

    def load(self):
        for number in self.config.numbers:
            yield HintTask(HintData(prompt="Guess my number.", number=number), self.config.task)


class HintEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HintEnv(vf.Env[HintEnvConfig]):
    """Answers guesses until one is right."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            guess = await game.turn()
            while not guess.terminated and guess.last_reply != str(task.data.number):
                if not guess.last_reply.isdigit():
                    return
                guess = await game.turn("higher" if int(guess.last_reply) < task.data.number else "lower")


__all__ = ["HintEnv", "HintTaskset"]
