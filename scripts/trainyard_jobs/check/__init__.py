"""Check job files: all rules, files and folders, SARIF, and the pages that list the rules and machines."""
