"""What all tests have in common."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without deadlines", deadline=None)  # seconds of one example say how busy the machine is
settings.load_profile("without deadlines")
