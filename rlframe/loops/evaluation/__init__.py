"""Evaluation and generation of whole data sets: what runs them, their sets, and the files of their results."""
