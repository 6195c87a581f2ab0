"""AdamW's step and the gradient norm by one kernel each for all parameters, on a GPU."""
