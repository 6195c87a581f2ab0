"""One file per environment: the side that answers the policy within one attempt."""
