"""The version of Forgefield, for the package, its runs and its command line."""

__version__ = "0.1.0"
