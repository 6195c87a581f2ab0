"""A run that changes nothing, as a test of the system: what it sees (`seen`), how (`procedure`), and the checks."""
