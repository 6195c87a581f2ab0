"""Alerts: what is wrong with a run, said once, in plain words.

base      an alert, which looks at the metrics of each step
rules     the alerts of every run, each with its settings
config    the section `alerts`
watch     all alerts of a run
"""
