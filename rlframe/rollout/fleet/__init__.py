"""The engines of a run as the driver sees them: actors, requests, deaths and restarts."""
