"""Code shared by engines whose model runs in processes of its own: requests, layouts and recordings."""
