"""Questions about compiled programs: collectives, what remat saves, why a run failed."""
