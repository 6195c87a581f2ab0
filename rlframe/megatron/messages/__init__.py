"""Messages between the driver and the ranks: micro-batches and reports."""
