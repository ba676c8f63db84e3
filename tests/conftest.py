"""What holds for every test: a property may take its time, so that a busy machine fails nothing."""

from hypothesis import settings

settings.register_profile("undertow", deadline=None)
settings.load_profile("undertow")
