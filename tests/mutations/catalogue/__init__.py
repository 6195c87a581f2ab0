"""Every planted fault, by area."""

from tests.mutations.catalogue import (
    accounts,
    algorithms,
    batches,
    bookkeeping,
    data,
    endpoint,
    loop,
    offline,
    online,
    rendering,
    reports,
    rollout,
    state,
    sync,
    tools,
    training,
    turns,
)
from tests.mutations.mutation import Mutation

MUTATIONS: list[Mutation] = [
    mutation
    for area in (
        online,
        algorithms,
        offline,
        batches,
        loop,
        training,
        data,
        state,
        sync,
        rollout,
        accounts,
        rendering,
        reports,
        bookkeeping,
        tools,
        endpoint,
        turns,
    )
    for mutation in area.MUTATIONS
]

assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS), "two faults share a name"
