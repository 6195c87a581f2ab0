"""Losses over texts that are compared with each other: pairs of responses, lists of documents, contrasts."""
