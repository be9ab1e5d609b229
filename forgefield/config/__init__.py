"""Settings: their schema, loading with overrides and checks, comments, comparison."""
