"""From files to token ids: records as read, conversations, rendered and tokenised prompts and examples, and the cursor
that deals each exactly once per epoch."""
