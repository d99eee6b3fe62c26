"""Run containers that are removed with their network, beside fakes of Google Cloud and with data to train on."""
