"""Attempts: prompts on their way to becoming rollouts, and the account of where each went."""
