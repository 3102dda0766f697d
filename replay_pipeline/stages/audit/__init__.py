"""Checks of the stored data, independent of the stages that wrote it.

Each function returns an `AuditResult`: whether the check passes, its figures, and what to do if it
fails.
"""
