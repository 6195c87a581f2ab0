"""From YAML and command line to a checked RunConfig: compose (Hydra), build (strict), check (across components), output
(the run's folder). Only this package and `rlframe.main` know Hydra and OmegaConf."""
