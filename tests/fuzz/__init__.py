"""Mutated files of every format that Forgefield reads, and the processes that read them."""
