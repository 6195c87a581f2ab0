"""One file per Hugging Face `model_type`, each ending in `FAMILY = ...`. `rlframe/models/README.md` tells how to add one."""
