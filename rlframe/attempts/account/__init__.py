"""The account of attempts: how each lease of a prompt ended, and the groups that files keep."""
