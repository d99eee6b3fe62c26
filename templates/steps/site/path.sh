# For login shells, whose PATH is set by /etc/profile.
PATH=/opt/venv/bin:$PATH
