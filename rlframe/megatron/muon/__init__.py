"""Muon: the matrices of a model orthogonalised, each by one rank."""
