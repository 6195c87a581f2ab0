"""Rules about the models beside the policy, which value, teach, judge and reward."""
