"""From messages and documents to tokens and masks."""
