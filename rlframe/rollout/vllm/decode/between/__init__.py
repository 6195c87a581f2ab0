"""What a decode step of few rows computes between two attentions, as one kernel."""
