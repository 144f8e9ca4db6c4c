"""Saving, loading and publishing experts."""
