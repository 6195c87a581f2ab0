"""Which copies carry every piece of every tensor from source to destination, and how they are packed."""
