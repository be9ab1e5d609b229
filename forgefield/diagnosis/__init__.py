"""What diagnosis callbacks leave in a run folder, read and drawn: records (`record.py`) and figures (`figures.py`)."""
