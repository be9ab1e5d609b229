"""The report of a run: figures and one self-contained HTML page, made from the run folder alone.

`page.write_report` writes the page, `figures` holds the plots, each usable by itself. Nothing here needs the model,
the training data or a network.
"""
