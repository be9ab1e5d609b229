"""Readers of other programs' trained models."""
