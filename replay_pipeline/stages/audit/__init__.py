"""What must hold of the data at rest, looked at from outside the stages that wrote it.

Each function returns an `AuditResult`: whether it holds, the figures, and what to do if it does not.
"""
