"""Storage on disk or on an object store: paths, tables, and their schemas and columns."""
