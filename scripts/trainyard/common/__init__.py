"""Share messages, settings, options, the rule engine and registration among all rooms."""
