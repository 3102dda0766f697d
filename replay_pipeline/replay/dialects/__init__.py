"""What servers speak: their requests, replies, and bills."""
