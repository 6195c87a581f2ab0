"""Checksums that show that every tensor has arrived."""
