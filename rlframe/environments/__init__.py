"""Environments, one file each: the side that answers the policy within one attempt."""
