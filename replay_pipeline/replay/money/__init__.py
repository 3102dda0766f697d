"""Who holds the money: the ledger, its limits, and what a call may cost."""
