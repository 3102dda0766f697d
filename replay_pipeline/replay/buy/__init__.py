"""Who buys: which question is worth its price, and what a replay would cost."""
