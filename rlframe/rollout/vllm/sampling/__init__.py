"""The draws of tokens in vLLM's worker, and the record of them and of their logprobs."""
