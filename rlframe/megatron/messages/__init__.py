"""What the driver sends to ranks and gets back: micro-batches and reports."""
