"""Detection of hangs, with the name of their cause.

`marks`: the last action of a rank, in a page of memory that other processes can read. `flight`: the collectives that a
rank is in. `sight`: the state of a process as seen from outside. `activities`: the driver's present activity, the
workers it waits for, and what attempts wait for. `limits`: how long that may take. `report`: the sentences. `watchdog`:
the thread that looks, warns and ends. `demand`: reports on request.
"""
