"""Who asks: a run, its rounds and attempts, and the rows that come of them."""
