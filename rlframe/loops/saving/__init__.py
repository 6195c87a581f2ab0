"""What a run leaves to go on from, and to use: checkpoints and exports."""
