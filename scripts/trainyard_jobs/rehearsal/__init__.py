"""Rehearse a job: run it in containers on this machine, as its platform would."""
