"""Small helpers: errors, faults, files, and the lookup of components by name. Imports nothing from other packages of
rlframe."""
