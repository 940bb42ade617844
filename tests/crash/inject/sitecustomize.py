"""Imported by every Python whose PYTHONPATH begins with this folder: the trainer's and its writer's."""

import os

if "CRASH_PLAN" in os.environ:
    import crash_points

    crash_points.install(os.environ["CRASH_PLAN"])
