"""What this machine gives: files or an object store, tables with their schemas, and processes."""
