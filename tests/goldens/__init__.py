"""What users see, as files: each holds commands, what they printed, and their exit statuses."""
