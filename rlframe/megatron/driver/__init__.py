"""Groups of ranks as the driver sees them."""
