"""What makes decode steps shorter than those of vLLM alone."""
