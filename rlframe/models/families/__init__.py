"""One file per Hugging Face `model_type`, each ending in `FAMILY = ...`. See `rlframe/models/README.md` to add one."""
