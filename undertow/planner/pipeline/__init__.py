"""A pipeline: layouts, schedules, and the timeline of an iteration."""
