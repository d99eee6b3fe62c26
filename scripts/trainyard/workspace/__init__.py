"""A user's repository: its code, requirements and Python projects."""
