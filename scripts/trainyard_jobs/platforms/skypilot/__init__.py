"""SkyPilot."""
