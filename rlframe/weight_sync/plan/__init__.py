"""The copies that carry every part of every tensor from source to destination, and their packing."""
