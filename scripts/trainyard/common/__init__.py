"""What every room builds on: messages, settings, options, rules, and what neighbours bring."""
