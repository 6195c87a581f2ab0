"""From files to token ids: records (as read), conversations (understood), prompts and examples (rendered, tokenised),
and the cursor that deals each exactly once per epoch."""
