"""One kernel for all that a decode step of few rows computes between two attentions."""
