"""One file per algorithm, pure torch. A file ends `COMPONENT, CONFIG = TheAlgorithm, TheConfig`; its name is what
`algorithm.name` says."""
