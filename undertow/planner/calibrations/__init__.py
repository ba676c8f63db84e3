"""Calibrations that are shipped, one JSON file each; `undertow.planner.calibration_file` reads them."""
