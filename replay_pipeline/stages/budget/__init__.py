"""Money beyond one batch: estimates, common ceilings, and shares."""
