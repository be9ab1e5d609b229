"""Sections of the report. Each is a function from `RunData` to markup; `report.page` lists them in order."""
