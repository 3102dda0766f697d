"""What lies on disk or on an object store: paths, tables, their schemas and columns."""
