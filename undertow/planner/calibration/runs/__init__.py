"""Calibrations that are shipped, one JSON file each; `undertow.planner.calibration.file` reads them."""
