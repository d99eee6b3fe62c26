"""Jobs on training platforms: requests, job files, machine types, and what images contain."""
