"""Rules about what a run runs on: the cluster, its devices, and their memory."""
