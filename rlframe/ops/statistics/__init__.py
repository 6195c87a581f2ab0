"""Statistics of attempts, which a report shows and no loss needs."""
