"""What a checkout or a host needs: generated files, checks, test suites, clean-up."""
