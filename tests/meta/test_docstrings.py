"""The English of docstrings: which word they begin with.

A function says what it does: its docstring begins with a verb in the third person ("Returns ...", "Packs ..."). An
override may say "See Base.method.", a constructor may begin with its "Args:". A property may say what it is, with a
noun phrase, and returns whether a truth holds; an attribute may begin with "Whether ..." or "True if ...". No
docstring begins in the middle of a sentence ("What ...", "Of the GPU.", "Those with experts.").
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlframe

PACKAGE = Path(rlframe.__file__).parent

VERBS = frozenset(
    """
    Aborts Accepts Adds Adjusts Admits Allocates Answers Appends Applies Asks Assigns Attaches Begins Binds Blocks
    Broadcasts Builds Caches Calls Cancels Carries Changes Checks Chooses Clears Clips Closes Collects Combines
    Compares Compiles Completes Composes Computes Connects Consumes Converts Copies Counts Creates Cuts Deals Decides
    Decodes Deletes Derives Detects Determines Digests Disables Discards Disconnects Dispatches Divides Does
    Downloads Draws Drops Empties Enables Encodes Ends Ensures Estimates Evaluates Executes Expands Exports Extends
    Extracts Feeds Fetches Fills Filters Finalizes Finds Finishes Fits Flattens Flushes Forces Forgets Forks
    Formats Forwards Frees Freezes Gathers Generates Gets Gives Groups Grows Handles Has Hashes Hides Holds
    Identifies Ignores Imports Inserts Inspects Installs Interrupts Joins Keeps Kills Launches Leaves Lets Limits
    Listens Lists Loads Locates Locks Logs Looks Makes Maps Marks Matches Measures Merges Mixes Moves Multiplies Names
    Normalizes Notes Obeys Opens Orders Overrides Packs Pads Parses Passes Pauses Pickles Picks Places Plans
    Prefers Prepares Prevents Prints Processes Produces Proves Publishes Pulls Pushes Puts Queries Queues Raises
    Ranks Reads Receives Recognises Recomputes Reconnects Records Reduces Refuses Registers Rejects Releases
    Reloads Remembers Removes Renames Renders Replaces Replays Reports Requests Requires Reserves Resets Resizes
    Resolves Restarts Restores Resumes Retries Returns Reverses Rewinds Rounds Routes Runs Samples Saves Scales
    Scores Searches Seeds Selects Sends Sets Shares Shows Shuffles Signals Simulates Skips Sleeps Sorts Splits
    Spreads Stages Starts Stops Stores Streams Submits Subtracts Sums Switches Synchronizes Syncs Takes Tests
    Ties Tokenises Tracks Trains Transfers Translates Tries Truncates Turns Undoes Unmaps Unpacks Updates Uploads Uses
    Suspends Validates Verifies Waits Wakes Walks Warns Watches Weighs Withdraws Wraps Writes Yields Zeroes
    """.split()
)

LEANING = frozenset("What Who Whoever Whatever Whose Where When Why How Which That Those These Such Of".split())
"""First words of a fragment, which only its surroundings complete."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST | None, ast.Constant]]:
    """Yields every docstring with its class or function; with None that of a module or an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for position, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            if isinstance(statement.value.value, str):
                owner = node if position == 0 and isinstance(node, (ast.ClassDef, *FUNCTIONS)) else None
                yield owner, statement.value


def fault(owner: ast.AST | None, text: str) -> str | None:
    """Returns what is wrong with the beginning of a docstring, or None."""
    word = text.split()[0].rstrip(".,;")
    if word in LEANING:
        return f"begins in the middle of a sentence: {word}"
    if not isinstance(owner, FUNCTIONS):
        return None
    if word == "Whether":
        return "must begin with Returns whether"
    if any("property" in ast.unparse(decorator) for decorator in owner.decorator_list):
        return None
    if word == "See" or (word == "Args:" and owner.name == "__init__"):
        return None
    if word not in VERBS:
        return f"must begin with a verb in the third person, got {word!r}; add it to VERBS if it is one"
    returned = ast.unparse(owner.returns) if owner.returns else ""
    if word == "Returns" and returned == "None":
        return "must not begin with Returns, because the function returns None"
    if word == "Yields" and not returned.startswith(("Iterator", "AsyncIterator", "Iterable", "Generator")):
        return f"must not begin with Yields, because the function returns {returned}"
    return None


def test_docstrings_begin_as_the_rule_says() -> None:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        for owner, constant in docstrings(ast.parse(file.read_text())):
            if problem := fault(owner, constant.value):
                found.append(f"{name}:{constant.lineno}: {problem}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ('def f() -> int:\n    """The number of ranks."""', "a verb in the third person, got 'The'"),
        ('def f() -> int:\n    """Return the number of ranks."""', "a verb in the third person, got 'Return'"),
        ('def f() -> None:\n    """Returns when all is done."""', "the function returns None"),
        ('def f() -> list[int]:\n    """Yields the ranks."""', "the function returns list[int]"),
        ('class C:\n    def f(self) -> None:\n        """Args: none."""', "a verb in the third person, got 'Args:'"),
        ('class C:\n    @property\n    def f(self) -> bool:\n        """Whether it is."""', "with Returns whether"),
        ('class C:\n    uuid: str\n    """Of the GPU."""', "begins in the middle of a sentence: Of"),
        ('class C:\n    """What a rank answers."""', "begins in the middle of a sentence: What"),
        ('class C:\n    @property\n    def f(self) -> int:\n        """How many there are."""', "of a sentence: How"),
    ],
)
def test_a_docstring_that_begins_otherwise_is_found(code: str, problem: str) -> None:
    ((owner, constant),) = docstrings(ast.parse(code))
    assert problem in (fault(owner, constant.value) or "")


@pytest.mark.parametrize(
    "code",
    [
        'def f() -> int:\n    """Returns the number of ranks."""',
        'class C:\n    @property\n    def f(self) -> int:\n        """Number of ranks."""',
        'class C:\n    def __init__(self, x: int):\n        """\n        Args:\n            x: a number.\n        """',
        'class C:\n    def f(self) -> None:\n        """See Base.f."""',
        'class C:\n    whole: bool\n    """Whether all of it is there."""',
    ],
)
def test_a_docstring_that_follows_the_rule_is_not(code: str) -> None:
    ((owner, constant),) = docstrings(ast.parse(code))
    assert fault(owner, constant.value) is None
