"""Sees to it that nothing hangs without a name.

`marks`: the last thing a rank did, in a page of memory that others can read. `flight`: the collectives a rank is in.
`sight`: what can be seen of a process from outside. `activities`: what the driver does and for whom it waits.
`limits`: how long that may take. `report`: the sentences. `watchdog`: the thread that looks, warns and ends.
`demand`: how a person asks it.
"""
