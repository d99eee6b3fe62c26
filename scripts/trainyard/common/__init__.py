"""Share messages, settings, options and the rule engine among all rooms."""
