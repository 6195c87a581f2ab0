"""Small helpers without a noun of their own: errors and the name-to-file lookup. Knows nothing above it."""
