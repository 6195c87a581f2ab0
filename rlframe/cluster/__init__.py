"""Ray: starting or joining a cluster, placement of actors, worker groups, and the handling of dead actors."""
