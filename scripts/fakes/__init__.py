"""Stand-ins for the services that images meet, each one self-contained file."""
