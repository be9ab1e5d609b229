"""All runs in a folder: one local page that follows them while they are trained, and the same tables in a terminal.

`record` reads one run again where its files have changed, `folder` finds the runs, `tables` makes tables, `answers` are what
the page asks for, `server` serves it, and `access` decides who may use it.
"""
