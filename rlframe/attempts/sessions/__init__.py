"""Sessions of environments, whose code users wrote. One that hangs, crashes or takes all memory ends one attempt only.

`pool` is what the runner uses, `process` is one worker as the pool sees it, `worker` the program that it runs, `calls`
what travels between them, and `marks` says which session runs at this moment."""
