"""The report of a run: figures and one self-contained HTML page, written from the run folder alone.

`page.write_report` writes the page, `figures` holds the plots, which can also be used separately. The
model, the training data and a network connection are not needed.
"""
