"""All engines of a run as the driver sees them: the actors, their requests, deaths and restarts."""
