"""Ray: starting or joining it, where actors go, worker groups, and what happens when an actor dies."""
