"""The page of a run: one HTML file that opens without a network.

files       what a run has left in its folder
curves      its metrics, the ones that matter first
times       where its time went, by phase and by role
attempts    rollouts token by token, as many as fit
page        the file
refresh     the file again and again, during a run
"""
