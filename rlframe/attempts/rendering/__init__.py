"""From messages to tokens and from sampled tokens to messages, for any chat template. What the policy sampled is never
tokenised again: the next turn is appended as the template writes it, or the conversation forks."""
