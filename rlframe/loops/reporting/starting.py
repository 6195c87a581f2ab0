"""Words for what a start waits for; see `rlframe.utils.process.telling`."""

import socket

from rlframe.cluster.info import WorkerInfo
from rlframe.cluster.watch.activities import ACTIVITIES, Activity
from rlframe.cluster.watch.marks import Page
from rlframe.cluster.watch.sight import mark_file
from rlframe.utils.process.telling import importing
from rlframe.utils.text import printable

MOST_NAMES = 4


def awaited() -> str:
    """Returns what the driver waits for at present, with the workers, in one line."""
    activities = ACTIVITIES.current()
    calls = [activity for activity in activities if activity.is_call]
    phases = [activity for activity in activities if not activity.is_call and not activity.is_run]
    if calls:
        return printable("; ".join(dict.fromkeys(map(_words, calls))))
    if phases:
        return phases[-1].name
    return importing() or (
        "data and plans, in the driver" if activities else "checks of the configuration and the data"
    )


def _words(call: Activity) -> str:
    workers = list(call.waits_for)
    names = [*call.not_started, *(f"{each.role} rank {each.rank}{_doing(each)}" for each in workers)]
    if not names:
        return call.name
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{call.name}, waiting for {', '.join(names[:MOST_NAMES])}{more}"


def _doing(worker: WorkerInfo) -> str:
    """Returns the last mark of a worker of this machine, in brackets. Empty if it has none."""
    if worker.host != socket.gethostname():
        return ""
    try:
        page = Page(mark_file(worker.path))
    except OSError:
        return ""
    text = page.read().text
    page.close()
    return f" ({text})" if text else ""
