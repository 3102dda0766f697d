"""Real coding clients, driven on loopback by a scripted model: what they log beside what they sent."""
