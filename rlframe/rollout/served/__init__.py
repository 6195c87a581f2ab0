"""What engines share whose model runs in processes of their own: requests, layouts and recordings."""
