"""How examples are drawn: the same ones every time, and as slowly as a shared machine makes it."""

from hypothesis import settings

settings.register_profile("rlframe", deadline=None, derandomize=True)
settings.load_profile("rlframe")
