"""Checksums that prove that every tensor has arrived."""
