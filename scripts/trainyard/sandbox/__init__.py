"""Provide what a container needs without a network: fakes of Google Cloud, and data to train on."""
